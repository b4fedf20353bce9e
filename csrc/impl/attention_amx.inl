// The products of attention_pairs.inl on AMX tiles.

// Tiles 0 to 3: sums; 4: queries; 5: keys; 6: weights of one block; 7: values of one block.
static inline void begin_products(int rows) {
  TileConfig c;
  for (int t = 0; t < 4; ++t) {
    c.rows[t] = (uint8_t)rows;
    c.bytes[t] = 64;
  }
  c.rows[4] = c.rows[6] = (uint8_t)rows;
  c.bytes[4] = 64;
  c.bytes[6] = 32;
  c.rows[5] = 16;
  c.rows[7] = 8;
  c.bytes[5] = c.bytes[7] = 64;
  _tile_loadconfig(&c);
}

static inline void end_products() { _tile_release(); }

// scores[16][64] = q . keys for up to four blocks.
static inline void score_rows(const uint16_t* q, int, int depth, const uint8_t* const* kv, const uint8_t* const*,
                              int blocks, float* scores) {
  const size_t ld = (size_t)depth * 2;
  _tile_zero(0);
  _tile_zero(1);
  _tile_zero(2);
  _tile_zero(3);
  for (int d = 0; d < depth; d += 32) {
    const size_t at = (size_t)d * 32;
    _tile_loadd(4, q + d, ld);
    _tile_loadd(5, kv[0] + at, 64);
    _tile_dpbf16ps(0, 4, 5);
    if (blocks > 1) {
      _tile_loadd(5, kv[1] + at, 64);
      _tile_dpbf16ps(1, 4, 5);
    }
    if (blocks > 2) {
      _tile_loadd(5, kv[2] + at, 64);
      _tile_dpbf16ps(2, 4, 5);
    }
    if (blocks > 3) {
      _tile_loadd(5, kv[3] + at, 64);
      _tile_dpbf16ps(3, 4, 5);
    }
  }
  _tile_stored(0, scores, kPieceTokens * 4);
  if (blocks > 1) _tile_stored(1, scores + 16, kPieceTokens * 4);
  if (blocks > 2) _tile_stored(2, scores + 32, kPieceTokens * 4);
  if (blocks > 3) _tile_stored(3, scores + 48, kPieceTokens * 4);
}

// update[16][padded] = weights . values, blocks in order; four chunks of 16 columns at a time.
static inline void value_tiles(const uint16_t* weights, const uint8_t* const* values, int blocks, int padded,
                               float* update) {
  const size_t ld = (size_t)padded * 4;
  for (int c = 0; c < padded; c += 64) {
    const int chunks = padded - c < 64 ? (padded - c) / 16 : 4;
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    for (int b = 0; b < blocks; ++b) {
      const uint8_t* v = values[b] + (size_t)(c / 16) * 512;
      _tile_loadd(6, weights + b * 16, kPieceTokens * 2);
      _tile_loadd(7, v, 64);
      _tile_dpbf16ps(0, 6, 7);
      if (chunks > 1) {
        _tile_loadd(7, v + 512, 64);
        _tile_dpbf16ps(1, 6, 7);
      }
      if (chunks > 2) {
        _tile_loadd(7, v + 1024, 64);
        _tile_dpbf16ps(2, 6, 7);
      }
      if (chunks > 3) {
        _tile_loadd(7, v + 1536, 64);
        _tile_dpbf16ps(3, 6, 7);
      }
    }
    _tile_stored(0, update + c, ld);
    if (chunks > 1) _tile_stored(1, update + c + 16, ld);
    if (chunks > 2) _tile_stored(2, update + c + 32, ld);
    if (chunks > 3) _tile_stored(3, update + c + 48, ld);
  }
}

static inline void add_weighed_values(const PairScratch& s, int rows, const uint8_t* const* values,
                                      const uint8_t* const*, int blocks, int padded, const float* alpha, float* out) {
  value_tiles(s.weights, values, blocks, padded, s.update);
  for (int r = 0; r < rows; ++r, out += padded) {
    const float* update = s.update + (size_t)r * padded;
    const V16 factor = V16::set1(alpha[r]);
    for (int d = 0; d < padded; d += 16) fma(V16::load(out + d), factor, V16::load(update + d)).store(out + d);
  }
}
