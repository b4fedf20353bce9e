// Calls f(first row, number of rows) for the fewest tiles of at most kMost rows, all nearly as high as each other
// (8 rows as 4 + 4 keep more sums in flight than 6 + 2); the number is a constant.
template <int kMost, class F>
static inline void in_row_tiles(int rows, const F& f) {
  const int tiles = (rows + kMost - 1) / kMost;
  for (int t = 0, row = 0; t < tiles; ++t) {
    const int here = (rows - row + tiles - t - 1) / (tiles - t);
    const auto call = [&](auto count) {
      if constexpr (count.value <= kMost) f(row, count);
    };
    switch (here) {
      case 6:
        call(std::integral_constant<int, 6>{});
        break;
      case 5:
        call(std::integral_constant<int, 5>{});
        break;
      case 4:
        call(std::integral_constant<int, 4>{});
        break;
      case 3:
        call(std::integral_constant<int, 3>{});
        break;
      case 2:
        call(std::integral_constant<int, 2>{});
        break;
      default:
        call(std::integral_constant<int, 1>{});
        break;
    }
    row += here;
  }
}
