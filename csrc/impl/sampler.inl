// The sampler, written once over V16; included inside each instruction set's own namespace.
//
// The including file has included <cmath>, <cstdint>, <cstring>, "sampler.h" and "impl/vec.h" before.
// No standard-library templates here: a shared instantiation would be compiled under several flag sets,
// and the linker would keep any one of them.
//
// How it is fast: one pass turns the row into maxima of groups of 64 logits. The k-th largest of these
// maxima is a lower bound of the k-th largest logit, so only groups that reach it can hold candidates.
// Nothing is ever sorted but the handful of top logprobs. All selections keep candidates in the order of
// their ids, and every draw walks them in that order, so that switching a filter on where it removes
// nothing changes nothing but the rounding of the sum.

namespace sampler_impl {

using ::octavo::SampleOut;
using ::octavo::SampleRow;

constexpr int32_t kGroup = 64;    // logits per maximum
constexpr int32_t kBlock = 1024;  // logits per partial sum: short enough that float sums keep 6 digits

// ---- Order of logits as order of unsigned ints: -inf is 0, then rising; +inf and every NaN lie at
// kInfKey or above, so a maximum over keys finds bad rows for free. Adding +0 makes -0 equal to +0.
constexpr uint32_t kKeyOffset = 0x007FFFFFu;
constexpr uint32_t kInfKey = 0xFF800000u - kKeyOffset;

inline uint32_t key_of(float logit) {
  const float x = logit + 0.0f;
  const uint32_t bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t flip = static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u;
  return (bits ^ flip) - kKeyOffset;
}

inline float value_of(uint32_t key) {
  const uint32_t ordered = key + kKeyOffset;
  const uint32_t bits = (ordered & 0x80000000u) ? ordered & 0x7FFFFFFFu : ~ordered;
  return __builtin_bit_cast(float, bits);
}

// ---- Scratch. Candidates are tokens still in play, in the order of their ids.
struct Scratch {
  double* weights;      // [V] of the candidates
  double* block_sums;   // [V / kBlock]
  float* logits;        // [V] the row after penalties, bias and bans
  int32_t* ids;         // [V] of the candidates; counts of generated tokens before that
  uint32_t* keys;       // [V] of the candidates
  uint32_t* group_max;  // [V / kGroup]
};

inline Scratch carve(void* memory, int32_t vocab_size) {
  const size_t padded = (static_cast<size_t>(vocab_size) + 63) / 64 * 64 + 64;
  char* at = reinterpret_cast<char*>((reinterpret_cast<uintptr_t>(memory) + 63) / 64 * 64);
  Scratch s;
  s.weights = reinterpret_cast<double*>(at);
  s.logits = reinterpret_cast<float*>(at += padded * 8);
  s.ids = reinterpret_cast<int32_t*>(at += padded * 4);
  s.keys = reinterpret_cast<uint32_t*>(at += padded * 4);
  s.block_sums = reinterpret_cast<double*>(at += padded * 4);
  s.group_max = reinterpret_cast<uint32_t*>(at += padded / 64 * 8);
  return s;
}

// ---- One pass over the row: maxima per group; returns the maximum of all.
inline uint32_t scan(const float* x, int32_t n, uint32_t* group_max) {
  uint32_t high = 0;
  int32_t start = 0;
  for (; start + kGroup <= n; start += kGroup) {
    uint32_t best = 0;
    for (int32_t i = 0; i < kGroup; ++i) {
      const uint32_t key = key_of(x[start + i]);
      best = key > best ? key : best;
    }
    group_max[start / kGroup] = best;
    high = best > high ? best : high;
  }
  if (start < n) {
    uint32_t best = 0;
    for (int32_t i = start; i < n; ++i) {
      const uint32_t key = key_of(x[i]);
      best = key > best ? key : best;
    }
    group_max[start / kGroup] = best;
    high = best > high ? best : high;
  }
  return high;
}

inline int32_t first_with_key(const float* x, int32_t n, const uint32_t* group_max, uint32_t key) {
  int32_t i = 0;
  while (group_max[i / kGroup] != key) i += kGroup;
  while (i < n && key_of(x[i]) != key) ++i;
  return i;
}

inline int32_t status_of(uint32_t max_key) {
  if (max_key >= kInfKey) return ::octavo::kSampleBadRow;
  return max_key == 0 ? ::octavo::kSampleNothingAllowed : ::octavo::kSampleOk;
}

// ---- Weights: exp((x - max) / temperature); 1 for the best token, 0 below exp(-87.33) and for -inf.
struct Weigher {
  V16 max_logit, inverse;
  // A temperature so small that its inverse overflows acts like 1e-30: all but the best weigh 0.
  Weigher(float max, float temperature)
      : max_logit(V16::set1(max)), inverse(V16::set1(temperature < 1e-30f ? 1e30f : 1.0f / temperature)) {}
  V16 operator()(V16 x) const { return exp16((x - max_logit) * inverse); }
};

inline V16 weigh_at_most_16(const Weigher& weigh, const float* x, int32_t n) {
  if (n >= kLanes) return weigh(V16::load(x));
  return keep_range(weigh(V16::load_partial(x, n)), 0, n, 0.0f);
}

// Sum of all weights, in an order fixed by n alone; block_sums[b] takes the part of block b.
inline double sum_weights(const Weigher& weigh, const float* x, int32_t n, double* block_sums) {
  double total = 0.0;
  for (int32_t start = 0; start < n; start += kBlock) {
    const int32_t end = n - start < kBlock ? n : start + kBlock;
    V16 sum[4] = {V16::zero(), V16::zero(), V16::zero(), V16::zero()};
    int32_t i = start;
    for (; i + 4 * kLanes <= end; i += 4 * kLanes) {
      for (int32_t j = 0; j < 4; ++j) sum[j] = sum[j] + weigh(V16::load(x + i + j * kLanes));
    }
    for (; i < end; i += kLanes) sum[0] = sum[0] + weigh_at_most_16(weigh, x + i, end - i);
    block_sums[start / kBlock] = static_cast<double>(hsum((sum[0] + sum[1]) + (sum[2] + sum[3])));
    total += block_sums[start / kBlock];
  }
  return total;
}

// ---- The row that is drawn from: penalties, bias, bans, mask, in this order.
inline bool exists(int32_t id, int32_t vocab_size) { return id >= 0 && id < vocab_size; }

// counts[V] is not initialised: only entries of tokens that occur are ever touched. -1 marks "done".
inline void apply_penalties(const SampleRow& row, float* x, int32_t* counts) {
  const int32_t n = row.vocab_size;
  const bool with_prompt = row.repetition_penalty != 1.0f;
  const int32_t num_prompt = with_prompt ? row.num_prompt_ids : 0;
  const int32_t num_all = num_prompt + row.num_output_ids;
  const auto id_at = [&](int32_t i) { return i < num_prompt ? row.prompt_ids[i] : row.output_ids[i - num_prompt]; };
  for (int32_t i = 0; i < num_all; ++i) {
    if (exists(id_at(i), n)) counts[id_at(i)] = 0;
  }
  for (int32_t i = 0; i < row.num_output_ids; ++i) {
    if (exists(row.output_ids[i], n)) ++counts[row.output_ids[i]];
  }
  for (int32_t i = 0; i < num_all; ++i) {
    const int32_t id = id_at(i);
    if (!exists(id, n) || counts[id] < 0) continue;
    float logit = x[id];
    if (with_prompt) logit = logit > 0.0f ? logit / row.repetition_penalty : logit * row.repetition_penalty;
    logit -= row.frequency_penalty * static_cast<float>(counts[id]);
    if (counts[id] > 0) logit -= row.presence_penalty;
    x[id] = logit;
    counts[id] = -1;
  }
}

inline bool has_penalties(const SampleRow& row) {
  if (row.repetition_penalty != 1.0f && row.num_prompt_ids + row.num_output_ids > 0) return true;
  return (row.presence_penalty != 0.0f || row.frequency_penalty != 0.0f) && row.num_output_ids > 0;
}

// Returns `logits` itself when the row asks for no change, else the changed copy.
inline const float* adjust(const SampleRow& row, const float* logits, const Scratch& s) {
  const int32_t n = row.vocab_size;
  const bool penalties = has_penalties(row);
  if (!penalties && row.num_bias == 0 && row.num_banned_ids == 0 && row.mask == nullptr) return logits;
  memcpy(s.logits, logits, static_cast<size_t>(n) * sizeof(float));
  if (penalties) apply_penalties(row, s.logits, s.ids);
  for (int32_t i = 0; i < row.num_bias; ++i) {
    if (exists(row.bias_ids[i], n)) s.logits[row.bias_ids[i]] += row.bias_values[i];
  }
  for (int32_t i = 0; i < row.num_banned_ids; ++i) {
    if (exists(row.banned_ids[i], n)) s.logits[row.banned_ids[i]] = -INFINITY;
  }
  if (row.mask != nullptr) {
    for (int32_t i = 0; i < n; ++i) {
      s.logits[i] = (row.mask[i / 32] >> (i % 32)) & 1u ? s.logits[i] : -INFINITY;
    }
  }
  return s.logits;
}

// ---- Selections.

// The k-th largest of keys[n], built bit by bit from the top in 32 branch-free counting passes; 0 when there
// are fewer than k.
inline uint32_t kth_largest(const uint32_t* keys, int32_t n, int32_t k) {
  uint32_t threshold = 0;
  for (uint32_t bit = 0x80000000u; bit != 0; bit >>= 1) {
    const uint32_t trial = threshold | bit;
    int32_t count = 0;
    for (int32_t i = 0; i < n; ++i) count += keys[i] >= trial;
    if (count >= k) threshold = trial;
  }
  return threshold;
}

// All tokens with keys of at least `threshold`, in order of ids.
inline int32_t collect(const float* x, int32_t n, const Scratch& s, uint32_t threshold) {
  int32_t num = 0;
  for (int32_t start = 0; start < n; start += kGroup) {
    if (s.group_max[start / kGroup] < threshold) continue;
    const int32_t end = n - start < kGroup ? n : start + kGroup;
    for (int32_t i = start; i < end; ++i) {
      const uint32_t key = key_of(x[i]);
      s.keys[num] = key;
      s.ids[num] = i;
      num += key >= threshold;
    }
  }
  return num;
}

inline int32_t num_groups(int32_t n) { return (n + kGroup - 1) / kGroup; }

// At least the k best tokens, and not many more: the k-th largest group maximum bounds the k-th largest logit.
inline int32_t collect_best(const float* x, int32_t n, const Scratch& s, int32_t k) {
  return collect(x, n, s, kth_largest(s.group_max, num_groups(n), k));
}

// Keeps the k best candidates; of equals at the border, those with the lowest ids.
inline int32_t keep_top_k(const Scratch& s, int32_t num, int32_t k) {
  if (num <= k) return num;
  const uint32_t border = kth_largest(s.keys, num, k);
  int32_t room = k;
  for (int32_t i = 0; i < num; ++i) room -= s.keys[i] > border;
  int32_t kept = 0;
  for (int32_t i = 0; i < num; ++i) {
    const uint32_t key = s.keys[i];
    if (key < border || (key == border && room-- <= 0)) continue;
    s.keys[kept] = key;
    s.ids[kept++] = s.ids[i];
  }
  return kept;
}

inline void weigh_candidates(const Weigher& weigh, const Scratch& s, int32_t num) {
  for (int32_t start = 0; start < num; start += kLanes) {
    const int32_t count = num - start < kLanes ? num - start : kLanes;
    float x[kLanes] = {};
    for (int32_t i = 0; i < count; ++i) x[i] = value_of(s.keys[start + i]);
    weigh(V16::load(x)).store(x);
    for (int32_t i = 0; i < count; ++i) s.weights[start + i] = static_cast<double>(x[i]);
  }
}

inline double candidate_mass(const Scratch& s, int32_t num) {
  double sum = 0.0;
  for (int32_t i = 0; i < num; ++i) sum += s.weights[i];
  return sum;
}

// One radix step: weights of the candidates whose upper key bits are those of `border`, by their next
// eight bits. Four strands, because neighbours often fall into the same bucket.
inline void mass_by_digit(const Scratch& s, int32_t num, uint32_t border, int32_t shift, double* mass) {
  double strands[4][256] = {};
  const uint64_t upper = static_cast<uint64_t>(border) >> (shift + 8);
  for (int32_t i = 0; i < num; ++i) {
    const uint32_t key = s.keys[i];
    if ((static_cast<uint64_t>(key) >> (shift + 8)) == upper) strands[i & 3][(key >> shift) & 255u] += s.weights[i];
  }
  for (int32_t d = 0; d < 256; ++d) mass[d] = (strands[0][d] + strands[1][d]) + (strands[2][d] + strands[3][d]);
}

// Keeps the fewest best candidates whose weights sum to at least `needed`, and at least one; among equals
// at the border, those with the lowest ids. Four radix steps find the border; nothing is sorted.
inline int32_t keep_mass(const Scratch& s, int32_t num, double needed) {
  needed = needed > 1e-30 ? needed : 1e-30;
  uint32_t border = 0;
  double above = 0.0;  // weight of the keys above the border's bucket
  for (int32_t shift = 24; shift >= 0; shift -= 8) {
    double mass[256];
    mass_by_digit(s, num, border, shift, mass);
    uint32_t digit = 255;
    for (; digit > 0 && above + mass[digit] < needed; --digit) above += mass[digit];
    border |= digit << shift;
  }
  int32_t kept = 0;
  for (int32_t i = 0; i < num; ++i) {
    const uint32_t key = s.keys[i];
    if (key < border || (key == border && above >= needed)) continue;
    if (key == border) above += s.weights[i];
    s.keys[kept] = key;
    s.weights[kept] = s.weights[i];
    s.ids[kept++] = s.ids[i];
  }
  return kept;
}

inline int32_t keep_min_weight(const Scratch& s, int32_t num, double least) {
  int32_t kept = 0;
  for (int32_t i = 0; i < num; ++i) {
    if (s.weights[i] < least) continue;
    s.weights[kept] = s.weights[i];
    s.ids[kept++] = s.ids[i];
  }
  return kept;
}

// ---- Draws: the first token, in order of ids, at which the running sum exceeds u * total.

inline int32_t draw_candidate(const Scratch& s, int32_t num, double u) {
  double total = 0.0;
  for (int32_t i = 0; i < num; ++i) total += s.weights[i];
  const double target = u * total;
  double sum = 0.0;
  int32_t last = 0;
  for (int32_t i = 0; i < num; ++i) {
    if (s.weights[i] <= 0.0) continue;
    sum += s.weights[i];
    last = s.ids[i];
    if (sum > target) break;
  }
  return last;
}

inline int32_t draw_any(const Weigher& weigh, const float* x, int32_t n, const Scratch& s, double u) {
  const double target = u * sum_weights(weigh, x, n, s.block_sums);
  // The block in which the running sum passes the target; the last one of any weight should rounding hide it.
  double sum = 0.0, next = 0.0;
  int32_t start = 0;
  for (int32_t at = 0; at < n && next <= target; at += kBlock) {
    if (s.block_sums[at / kBlock] <= 0.0) continue;
    start = at;
    sum = next;
    next += s.block_sums[at / kBlock];
  }
  const int32_t end = n - start < kBlock ? n : start + kBlock;
  int32_t last = start;
  for (int32_t i = start; i < end; i += kLanes) {
    float weights[kLanes];
    weigh_at_most_16(weigh, x + i, end - i).store(weights);
    for (int32_t j = 0; j < kLanes; ++j) {
      if (weights[j] <= 0.0f) continue;
      sum += static_cast<double>(weights[j]);
      last = i + j;
      if (sum > target) return last;
    }
  }
  return last;
}

// A key that every token of at least this weight (relative to the best token's) reaches. Rounding slack
// only makes the list longer.
inline uint32_t key_of_weight(float max_logit, float temperature, double weight) {
  const double logit = static_cast<double>(max_logit) + (log(weight) - 1e-3) * static_cast<double>(temperature);
  const double slack = 1e-6 * (logit < 0.0 ? -logit : logit);
  const double least = logit - slack;
  return least < -3.4e38 ? 0 : key_of(static_cast<float>(least));
}

// Candidates that hold the top_p share of the whole distribution: ever longer lists of the best tokens, at
// last all that can matter (tokens below (1 - p) Z / V weigh less than (1 - p) Z together).
inline int32_t collect_mass(const Weigher& weigh, const SampleRow& row, const float* x, float max_logit,
                            const Scratch& s, double* needed) {
  const int32_t n = row.vocab_size;
  const double total = sum_weights(weigh, x, n, s.block_sums);
  *needed = static_cast<double>(row.top_p) * total;
  for (int32_t k = 64; k <= num_groups(n) / 2; k *= 4) {
    const int32_t num = collect_best(x, n, s, k);
    weigh_candidates(weigh, s, num);
    if (candidate_mass(s, num) >= *needed) return num;
  }
  const double least = (1.0 - static_cast<double>(row.top_p)) * total / n;
  const int32_t num = collect(x, n, s, key_of_weight(max_logit, row.temperature, least));
  weigh_candidates(weigh, s, num);
  return num;
}

inline int32_t draw(const SampleRow& row, const float* x, float max_logit, const Scratch& s) {
  const int32_t n = row.vocab_size;
  const double u = ::octavo::sample_uniform(row.seed, row.sample_index, row.position);
  const Weigher weigh(max_logit, row.temperature);
  const bool top_k = row.top_k > 0 && row.top_k < n;
  const bool top_p = row.top_p < 1.0f;
  if (!top_k && !top_p && !(row.min_p > 0.0f)) return draw_any(weigh, x, n, s, u);
  int32_t num;
  double needed = 0.0;
  if (top_k) {
    num = keep_top_k(s, collect_best(x, n, s, row.top_k), row.top_k);
    weigh_candidates(weigh, s, num);
    if (top_p) needed = static_cast<double>(row.top_p) * candidate_mass(s, num);
  } else if (top_p) {
    num = collect_mass(weigh, row, x, max_logit, s, &needed);
  } else {
    num = collect(x, n, s, key_of_weight(max_logit, row.temperature, static_cast<double>(row.min_p)));
    weigh_candidates(weigh, s, num);
  }
  if (top_p) num = keep_mass(s, num, needed);
  if (row.min_p > 0.0f) num = keep_min_weight(s, num, static_cast<double>(row.min_p));
  return draw_candidate(s, num, u);
}

// ---- Logprobs, from the row as it was given.

struct Normaliser {
  double max_logit, log_sum;
  float logprob(float x) const { return static_cast<float>(static_cast<double>(x) - max_logit - log_sum); }
};

// 1 + the number of tokens before `id`: those with a larger logit, or an equal one and a lower id.
inline int32_t rank_of(const float* x, int32_t n, int32_t id) {
  const float logit = x[id];
  int32_t rank = 1;
  for (int32_t i = 0; i < id; ++i) rank += x[i] >= logit;
  for (int32_t i = id + 1; i < n; ++i) rank += x[i] > logit;
  return rank;
}

// The most probable tokens, best first. Entries beyond the vocabulary, if any, get id -1 and -inf.
inline void list_top(const float* x, int32_t n, const Normaliser& normaliser, int32_t num_top, const Scratch& s,
                     int32_t* top_ids, float* top_logprobs) {
  const int32_t num = num_top > 0 ? keep_top_k(s, collect_best(x, n, s, num_top), num_top) : 0;
  for (int32_t i = 1; i < num; ++i) {  // insertion sort; stable, so equal logits stay in order of ids
    const uint32_t key = s.keys[i];
    const int32_t id = s.ids[i];
    int32_t j = i;
    for (; j > 0 && s.keys[j - 1] < key; --j) {
      s.keys[j] = s.keys[j - 1];
      s.ids[j] = s.ids[j - 1];
    }
    s.keys[j] = key;
    s.ids[j] = id;
  }
  for (int32_t i = 0; i < num_top; ++i) {
    top_ids[i] = i < num ? s.ids[i] : -1;
    top_logprobs[i] = i < num ? normaliser.logprob(x[s.ids[i]]) : -INFINITY;
  }
}

// The token of the row, or a status other than ok. `max_key` and s.group_max are those of `logits`.
inline int32_t choose(const SampleRow& row, const float* logits, uint32_t max_key, const Scratch& s, int32_t* token) {
  const float* x = adjust(row, logits, s);
  if (x != logits) max_key = scan(x, row.vocab_size, s.group_max);
  const int32_t status = status_of(max_key);
  if (status != ::octavo::kSampleOk) return status;
  if (!(row.temperature > 0.0f)) {
    *token = first_with_key(x, row.vocab_size, s.group_max, max_key);
  } else {
    *token = draw(row, x, value_of(max_key), s);
  }
  return status;
}

}  // namespace sampler_impl

// One row of vocab_size logits -> *out. top_ids and top_logprobs take num_logprobs entries when that is
// positive (undefined when the status is not ok). `scratch` has sampler_scratch_bytes(vocab_size) bytes.
inline void sample_row(const float* logits, const ::octavo::SampleRow& row, ::octavo::SampleOut* out, int32_t* top_ids,
                       float* top_logprobs, void* scratch) {
  using namespace sampler_impl;
  *out = {0, ::octavo::kSampleNothingAllowed, 0.0f, 0};
  const int32_t n = row.vocab_size;
  if (n <= 0 || (!row.sample && !exists(row.target, n))) return;
  const Scratch s = carve(scratch, n);
  const uint32_t max_key = scan(logits, n, s.group_max);
  out->status = status_of(max_key);
  if (out->status != ::octavo::kSampleOk) return;
  int32_t token = row.target;
  if (row.sample && row.num_logprobs < 0) {
    out->status = choose(row, logits, max_key, s, &token);
    out->token = out->status == ::octavo::kSampleOk ? token : 0;
    return;
  }
  const float max_logit = value_of(max_key);
  const double sum = sum_weights(Weigher(max_logit, 1.0f), logits, n, s.block_sums);
  const Normaliser normaliser{static_cast<double>(max_logit), log(sum)};
  list_top(logits, n, normaliser, row.num_logprobs, s, top_ids, top_logprobs);
  if (row.sample) out->status = choose(row, logits, max_key, s, &token);
  if (out->status != ::octavo::kSampleOk) return;
  out->token = token;
  out->logprob = normaliser.logprob(logits[token]);
  out->rank = rank_of(logits, n, token);
}
