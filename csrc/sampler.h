// The contract of the sampler: one row of logits in, one token (or the score of one token) out.
//
// `sample_row` itself is compiled once per instruction set (impl/sampler.inl) and reached through the
// dispatch table. It is a pure function of its arguments: no state, no allocation, no exceptions; so
// threads may call it at will, each with its own scratch.
#pragma once

#include <cstddef>
#include <cstdint>

namespace octavo {

// What to do with one row. Pointers are borrowed for the call; null with a count of 0 is fine, and so
// are ids outside [0, vocab_size): they are passed over.
struct SampleRow {
  float temperature = 1.0f;         // 0: argmax, ties to the lowest id
  float top_p = 1.0f;               // 1: off; 0: only the most probable token
  float min_p = 0.0f;               // 0: off
  float presence_penalty = 0.0f;    // generated tokens only
  float frequency_penalty = 0.0f;   // generated tokens only
  float repetition_penalty = 1.0f;  // prompt and generated tokens
  int32_t top_k = 0;                // 0 (or less, or >= vocab_size): off
  uint64_t seed = 0;
  uint32_t sample_index = 0;  // which of the n samples of the request
  uint32_t position = 0;      // of the token being drawn
  const int32_t* prompt_ids = nullptr;
  int32_t num_prompt_ids = 0;
  const int32_t* output_ids = nullptr;
  int32_t num_output_ids = 0;
  const int32_t* banned_ids = nullptr;
  int32_t num_banned_ids = 0;
  const int32_t* bias_ids = nullptr;
  const float* bias_values = nullptr;
  int32_t num_bias = 0;
  const uint32_t* mask = nullptr;  // bit i % 32 of word i / 32 set: token i allowed; null: all are
  int32_t num_logprobs = -1;       // length of the list of most probable tokens; -1: no logprobs at all
  int32_t vocab_size = 0;          // logits in the row
  bool sample = true;              // false: score `target` instead of drawing
  int32_t target = 0;
};

enum SampleStatus : int32_t {
  kSampleOk = 0,
  kSampleBadRow = 1,         // a NaN or +inf among the logits, given or after the penalties
  kSampleNothingAllowed = 2  // every token is at -inf (or `target` is no token): there is nothing to draw
};

struct SampleOut {
  int32_t token;   // valid with status kSampleOk only
  int32_t status;  // SampleStatus
  float logprob;   // of the given row, before penalties, bias, bans and temperature; set when wanted
  int32_t rank;    // 1: most probable; among equal logits the lowest id comes first; set when wanted
};

// Bytes of scratch that one call needs; no alignment is asked of it. About 20 bytes per token.
static inline size_t sampler_scratch_bytes(int32_t vocab_size) {
  const size_t padded = (static_cast<size_t>(vocab_size) + 63) / 64 * 64 + 64;
  return padded * (4 + 4 + 4 + 8) + padded / 64 * 4 + padded / 64 * 8 + 64;
}

struct Philox4x32 {
  uint32_t word[4];
};

// Philox4x32-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011):
// a random function of 128 bits of counter under 64 bits of key.
static inline Philox4x32 philox4x32(Philox4x32 counter, uint32_t key0, uint32_t key1) {
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = uint64_t{0xD2511F53u} * counter.word[0];
    const uint64_t product1 = uint64_t{0xCD9E8D57u} * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key0, static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key1, static_cast<uint32_t>(product0)}};
    key0 += 0x9E3779B9u;
    key1 += 0xBB67AE85u;
  }
  return counter;
}

// The draw of one token: uniform in [0, 1) with 53 bits, a function of seed, sample and position alone
// (law 1). Counter words 2 and 3 stay free for other draws at the same position.
static inline double sample_uniform(uint64_t seed, uint32_t sample_index, uint32_t position) {
  const Philox4x32 r =
      philox4x32({{sample_index, position, 0, 0}}, static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32));
  const uint64_t bits = (uint64_t{r.word[1]} << 32 | r.word[0]) >> 11;
  return static_cast<double>(bits) * 0x1p-53;
}

}  // namespace octavo
