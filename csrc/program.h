// The op program: a model's forward pass, recorded once, replayed for every step without Python.
//
// Values live in buffers of floats, one row per token (or, after gather(), one row per row of logits). Ops
// are appended in the order of execution; views name a column range of a buffer. execute() runs all ops of
// one step, sampling included, on the pool's threads.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "formats.h"
#include "kernels.h"
#include "threads.h"

namespace octavo {

struct View {
  int buffer;
  int offset;  // first column
  int width;   // columns
};

struct LinearPart {
  int matrix;
  int column;  // of the destination view where this matrix's output starts
};

// What one step is about; pointers are borrowed for the call.
struct StepInput {
  int num_tokens;
  const int32_t* token_ids;    // [num_tokens]
  const int32_t* positions;    // [num_tokens]
  int num_rows;                // sequences
  const int32_t* row_start;    // [num_rows + 1] first token of each
  const int32_t* table_start;  // [num_rows + 1] first entry of each in block_ids
  const int32_t* block_ids;
  int num_copies;
  const int32_t* copies;         // [num_copies][2] block copied from, to
  int num_outputs;               // rows of logits
  const int32_t* output_tokens;  // [num_outputs] which token's hidden state each comes from
  const SampleRow* samples;      // [num_outputs]
  int top_stride;                // room for most probable tokens per row
  SampleOut* results;            // [num_outputs]
  int32_t* top_ids;              // [num_outputs][top_stride]
  float* top_logprobs;
  bool all_rows;  // the buffer that gather() reads must hold every row of the step, not only those of outputs
};

enum class OpCode : int {
  kEmbedding,
  kRmsNorm,
  kAddRmsNorm,
  kAdd,
  kLinear,
  kGatedLinear,
  kHeadNorm,
  kRope,
  kAttention,
  kGather,
  kSample,
  kCount
};
extern const char* const kOpNames[(int)OpCode::kCount];

struct KvShape {
  int layers = 0, heads = 0, head_dim = 0;
  KvType type = KvType::kBf16;
};

// A row length in elements of `size` bytes that keeps consecutive rows out of the same cache sets: rows exactly a
// multiple of 1 KiB apart evict each other when a kernel walks down a column of tiles.
inline int64_t spread(int64_t length, int64_t size) { return length * size % 1024 == 0 ? length + 64 / size : length; }

// States of spans that there is room for, at least.
constexpr int kSpansPerThread = 64;

// Most panels of gate and up that one item of a gated linear takes: its rows of both stay in the L2 cache.
constexpr int kGatedPanels = 4;

class Program {
 public:
  Program(const Kernels* kernels, int num_threads, int max_tokens, int max_outputs);
  ~Program();

  int num_threads() const { return pool_.size(); }
  const Kernels& kernels() const { return *kernels_; }
  ThreadPool& pool() { return pool_; }

  int add_matrix(const FormatInfo& format, const uint8_t* data, int n, int k);
  int add_table(const FormatInfo& format, const uint8_t* data, int rows,
                int width);  // embedding; data is kept, not copied
  int add_vector(const float* data, int n);
  int add_buffer(int width, bool outputs);  // outputs: rows of logits, else rows of tokens
  void set_rope(const float* cos, const float* sin, int positions, int half_dim);
  void set_kv_shape(const KvShape& shape) { kv_ = shape; }
  void allocate_kv(int num_blocks, bool poison);
  size_t kv_bytes_per_block() const;
  size_t weight_bytes() const;

  void embedding(int table, View out);
  void rms_norm(View x, int weight, float eps, View out);
  void add_rms_norm(View x, View delta, int weight, float eps, View out);
  void add(View x, View delta);
  void linear(View x, std::vector<LinearPart> parts, int bias, View out);  // bias -1: none
  void gated_linear(View x, int gate, int up, int bias, View out);         // bias: of gate, then of up
  void head_norm(View x, int head_dim, int weight, float eps);
  void rope(View x, int head_dim);
  void attention(View q, View k, View v, int layer, int window, float scale, View out);
  void gather(View x, View out);
  void sample(View logits);

  void execute(const StepInput& in);

  const PackedMatrix& matrix(int i) const { return matrices_.at(i); }
  const float* buffer_data(int i) const { return buffers_.at(i).data(); }
  float* buffer_data(int i) { return buffers_.at(i).data(); }
  int64_t buffer_stride(int i) const { return buffers_.at(i).stride; }
  int buffer_width(int i) const { return buffers_.at(i).width; }
  int buffer_rows(int i) const { return buffers_.at(i).outputs ? output_rows_ : max_tokens_; }
  int num_ops() const { return (int)ops_.size(); }
  int num_kv_blocks() const { return num_blocks_; }
  int max_tokens() const { return max_tokens_; }
  int num_positions() const { return rope_positions_; }
  int vocab_size() const { return tables_.empty() ? 0 : tables_.front().rows; }
  const std::array<double, (int)OpCode::kCount>& op_seconds() const { return op_seconds_; }

 private:
  struct Buffer {
    int width;
    int64_t stride;
    bool outputs;
    Bytes memory;  // float [rows][stride]
    float* data() const { return (float*)memory.get(); }
  };
  struct Table {
    const FormatInfo* format;
    const uint8_t* data;
    int rows, width;
    size_t row_bytes;
  };
  struct Op {
    OpCode code;
    View a{}, b{}, c{}, out{};
    int index = 0;  // weight, table or layer
    int size = 0;   // head_dim or window
    float number = 0.0f;
    std::vector<LinearPart> parts;
    int bias = -1;
    // The norm before a linear leaves its rows prepared for it, while they are in the nearest cache.
    int prepares = kAsFloat;
    bool is_prepared = false;
  };
  struct RowRange {  // a block of rows
    int begin, end, block;
  };
  struct Tile {  // attention work: a few query tokens of one sequence
    int row, first_token, num_tokens, first_pos;
  };
  struct SpanItem {  // of one KV head and one span of keys, or of all (-1)
    int tile, head, span;
    size_t states;  // where the states of the tile and head begin
  };

  void check(const View& v, const char* what) const;
  void check_vector(int weight, int size, const char* what) const;
  Op& append(OpCode code);
  float* at(const View& v, int64_t row) const {
    return buffers_[v.buffer].data() + row * buffers_[v.buffer].stride + v.offset;
  }
  int64_t stride(const View& v) const { return buffers_[v.buffer].stride; }
  template <class F>
  void for_rows(int rows, int cost, const F& f);

  void find_tail();
  bool pack_outputs(const StepInput& in);
  void copy_blocks(const StepInput& in);
  void plan_tiles(const StepInput& in);
  void run(const Op& op, const StepInput& in, int rows, int first_output);
  void chain(Op& op, View x);
  int64_t prepared_stride(int k) const { return spread(padded32(k) * (int64_t)kernels_->prepared_value_bytes / 2, 2); }
  int preparation(const Op& op) const;
  void prepare_row(View x, int row, int preparation);
  int row_blocks(int rows) const { return (rows + kernels_->row_block - 1) / kernels_->row_block; }
  LinearArgs linear_args(const Op& op, int matrix, const float* bias, RowRange rows) const;
  RowRange row_range(int rows, int block) const {
    const int64_t blocks = row_blocks(rows);
    return {(int)(rows * block / blocks), (int)(rows * (block + 1) / blocks), block};
  }
  template <class F>
  void for_row_blocks(int rows, int items, const F& f);
  void prepare_input(const Op& op, int rows);
  int panels_per_item(const Op& op, int rows) const;
  void run_linear(const Op& op, int rows);
  void run_gated_linear(const Op& op, int rows);
  void run_attention(const Op& op, const StepInput& in);
  void plan_spans(const Op& op);
  int query_group(const Op& op) const { return op.a.width / (kv_.heads * kv_.head_dim); }
  AttentionTask attention_task(const Op& op, const StepInput& in, const SpanItem& item);
  void run_sample(const Op& op, const StepInput& in, int rows, int first_output);
  uint8_t* kv_at(int layer, int block, int head) const;

  const Kernels* kernels_;
  ThreadPool pool_;
  int max_tokens_, max_outputs_, output_rows_;
  Arena arena_;  // of the matrices
  std::vector<PackedMatrix> matrices_;
  std::vector<Table> tables_;
  std::vector<std::vector<float>> vectors_;
  std::vector<Buffer> buffers_;
  std::vector<Op> ops_;
  // Behind the last attention only rows of outputs matter: from this op to the gather only they are computed, packed
  // together in the views that these ops find written.
  int tail_at_ = -1;
  std::vector<View> tail_inputs_;
  std::vector<int32_t> in_order_;  // 0, 1, 2, ...
  int gather_at_ = -1;             // index of the gather op; the ops behind it run in chunks of output_rows_ rows
  std::vector<float> cos_, sin_;
  int rope_positions_ = 0, rope_half_ = 0;
  KvShape kv_;
  int num_blocks_ = 0;
  uint8_t* kv_memory_ = nullptr;
  size_t kv_memory_bytes_ = 0;
  std::vector<Tile> tiles_;
  std::vector<SpanItem> span_items_, merges_;
  std::vector<float> span_states_;       // of items that are one span of several
  Bytes prepared_{nullptr, free_bytes};  // prepared rows of the current linear's input
  int prepared_width_ = 0;               // values of a row that there is room for
  Bytes sums_{nullptr, free_bytes};      // and what else prepare_row leaves of them
  std::vector<LargeValue> large_;        // of the prepared rows
  std::vector<int32_t> large_channels_, channel_of_;
  std::vector<LargeValues> large_blocks_;      // of each block of rows
  std::vector<std::vector<uint8_t>> scratch_;  // per thread
  std::array<double, (int)OpCode::kCount> op_seconds_{};
};

}  // namespace octavo
