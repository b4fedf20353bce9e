// See program.h.
#include "program.h"

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>

namespace octavo {

const char* const kOpNames[(int)OpCode::kCount] = {"embedding", "rms_norm",     "add_rms_norm", "add",
                                                   "linear",    "gated_linear", "head_norm",    "rope",
                                                   "attention", "gather",       "sample"};

namespace {

// Rows of logits computed at a time: bounds the logits buffer when many prompt positions are scored.
constexpr int kOutputRows = 64;

// Rows that a loop must have before it is worth waking the other threads for a cheap op.
constexpr int kParallelRows = 8;

// A row length in elements of `size` bytes that keeps consecutive rows out of the same cache sets: rows exactly a
// multiple of 1 KiB apart evict each other when a kernel walks down a column of tiles.
int64_t spread(int64_t length, int64_t size) { return length * size % 1024 == 0 ? length + 64 / size : length; }

int64_t prepared_stride(int k) { return spread((k + 31) / 32 * 32, 2); }

// Most panels of gate and up that one item of a gated linear takes: its rows of both stay in the L2 cache.
constexpr int kGatedPanels = 4;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

Program::Program(const Kernels* kernels, int num_threads, int max_tokens, int max_outputs)
    : kernels_(kernels),
      pool_(num_threads),
      max_tokens_(max_tokens),
      max_outputs_(max_outputs),
      output_rows_(std::min(kOutputRows, max_outputs)),
      scratch_(num_threads) {}

Program::~Program() {
  if (kv_memory_ != nullptr) munmap(kv_memory_, kv_memory_bytes_);
}

// ---- building

int Program::add_matrix(const FormatInfo& format, const uint8_t* data, int n, int k) {
  PackedMatrix m = make_packed(format, n, k);
  pool_.run(m.panels, [&](int64_t p, int) { pack_panel(m, format, data, (int)p); });
  const size_t scratch = std::max(kernels_->linear_scratch_bytes(k), (size_t)k * 64);
  for (std::vector<uint8_t>& s : scratch_)
    if (s.size() < scratch) s.resize(scratch);
  const size_t rows = (size_t)std::max(max_tokens_, output_rows_);
  if (kernels_->wants_prepared(m) && prepared_count_ < rows * prepared_stride(k)) {
    prepared_count_ = rows * prepared_stride(k);
    prepared_ = allocate_bytes(prepared_count_ * 2);
    sums_.resize(rows * (size_t)sums_per_row(k));
  }
  matrices_.push_back(std::move(m));
  return (int)matrices_.size() - 1;
}

int Program::add_table(const FormatInfo& format, const uint8_t* data, int rows, int width) {
  tables_.push_back({&format, data, rows, width, (size_t)(width / format.block_len) * format.block_bytes});
  return (int)tables_.size() - 1;
}

int Program::add_vector(const float* data, int n) {
  vectors_.emplace_back(data, data + n);
  return (int)vectors_.size() - 1;
}

int Program::add_buffer(int width, bool outputs) {
  const int64_t stride = spread((width + 15) / 16 * 16, 4);
  const size_t bytes = (size_t)stride * (size_t)(outputs ? output_rows_ : max_tokens_) * 4;
  buffers_.push_back({width, stride, outputs, allocate_bytes(bytes)});
  return (int)buffers_.size() - 1;
}

void Program::set_rope(const float* cos, const float* sin, int positions, int half_dim) {
  const size_t count = (size_t)positions * half_dim;
  cos_.assign(cos, cos + count);
  sin_.assign(sin, sin + count);
  rope_positions_ = positions;
  rope_half_ = half_dim;
}

size_t Program::kv_bytes_per_block() const {
  return (size_t)kv_.layers * kv_.heads * kv_block_head_bytes(kv_.head_dim, kv_.wide);
}

size_t Program::weight_bytes() const {
  size_t total = 0;
  for (const PackedMatrix& m : matrices_) total += m.bytes();
  for (const std::vector<float>& v : vectors_) total += v.size() * 4;
  return total;
}

void Program::allocate_kv(int num_blocks, bool poison) {
  if (kv_memory_ != nullptr) throw std::logic_error("the KV pool is already allocated");
  kv_memory_bytes_ = kv_bytes_per_block() * (size_t)num_blocks;
  // Anonymous pages cost nothing until a block is first written.
  void* p = mmap(nullptr, kv_memory_bytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (p == MAP_FAILED) throw std::bad_alloc();
  madvise(p, kv_memory_bytes_, MADV_HUGEPAGE);
  kv_memory_ = (uint8_t*)p;
  num_blocks_ = num_blocks;
  if (poison) memset(p, 0xff, kv_memory_bytes_);  // NaN in both formats: reading an unwritten slot shows
}

uint8_t* Program::kv_at(int layer, int block, int head) const {
  const size_t size = kv_block_head_bytes(kv_.head_dim, kv_.wide);
  return kv_memory_ + (((size_t)layer * num_blocks_ + block) * kv_.heads + head) * size;
}

void Program::check(const View& v, const char* what) const {
  if (v.buffer < 0 || v.buffer >= (int)buffers_.size() || v.offset < 0 || v.width <= 0 ||
      v.offset + v.width > buffers_[v.buffer].width)
    throw std::invalid_argument(std::string(what) + ": view outside its buffer");
}

void Program::check_vector(int weight, int size, const char* what) const {
  if (weight < 0 || weight >= (int)vectors_.size() || (int)vectors_[weight].size() != size)
    throw std::invalid_argument(std::string(what) + ": weight has the wrong size");
}

Program::Op& Program::append(OpCode code) {
  ops_.emplace_back();
  ops_.back().code = code;
  return ops_.back();
}

static void require(bool ok, const char* message) {
  if (!ok) throw std::invalid_argument(message);
}

void Program::embedding(int table, View out) {
  check(out, "embedding");
  require(table >= 0 && table < (int)tables_.size() && tables_[table].width == out.width,
          "embedding: table does not match");
  Op& op = append(OpCode::kEmbedding);
  op.index = table;
  op.out = out;
}

void Program::rms_norm(View x, int weight, float eps, View out) {
  check(x, "rms_norm");
  check(out, "rms_norm");
  check_vector(weight, x.width, "rms_norm");
  require(x.width == out.width, "rms_norm: widths differ");
  Op& op = append(OpCode::kRmsNorm);
  op.a = x;
  op.out = out;
  op.index = weight;
  op.number = eps;
}

void Program::add_rms_norm(View x, View delta, int weight, float eps, View out) {
  check(x, "add_rms_norm");
  check(delta, "add_rms_norm");
  check(out, "add_rms_norm");
  check_vector(weight, x.width, "add_rms_norm");
  require(x.width == out.width && x.width == delta.width, "add_rms_norm: widths differ");
  Op& op = append(OpCode::kAddRmsNorm);
  op.a = x;
  op.b = delta;
  op.out = out;
  op.index = weight;
  op.number = eps;
}

void Program::add(View x, View delta) {
  check(x, "add");
  check(delta, "add");
  require(x.width == delta.width, "add: widths differ");
  Op& op = append(OpCode::kAdd);
  op.a = x;
  op.b = delta;
}

void Program::linear(View x, std::vector<LinearPart> parts, int bias, View out) {
  check(x, "linear");
  check(out, "linear");
  for (const LinearPart& p : parts) {
    require(p.matrix >= 0 && p.matrix < (int)matrices_.size(), "linear: no such matrix");
    const PackedMatrix& m = matrices_[p.matrix];
    require(m.k == x.width && p.column >= 0 && p.column + m.n <= out.width, "linear: matrix does not match");
  }
  if (bias >= 0) check_vector(bias, out.width, "linear");
  Op& op = append(OpCode::kLinear);
  op.a = x;
  op.out = out;
  op.parts = std::move(parts);
  op.bias = bias;
  chain(op, x);
}

void Program::gated_linear(View x, int gate, int up, int bias, View out) {
  check(x, "gated_linear");
  check(out, "gated_linear");
  for (int matrix : {gate, up}) {
    require(matrix >= 0 && matrix < (int)matrices_.size(), "gated_linear: no such matrix");
    require(matrices_[matrix].k == x.width && matrices_[matrix].n == out.width, "gated_linear: matrix does not match");
  }
  if (bias >= 0) check_vector(bias, 2 * out.width, "gated_linear");
  Op& op = append(OpCode::kGatedLinear);
  op.a = x;
  op.out = out;
  op.parts = {{gate, 0}, {up, 0}};
  op.bias = bias;
  chain(op, x);
  const size_t rows = (size_t)std::max(max_tokens_, output_rows_);
  const size_t bytes = kernels_->linear_scratch_bytes(x.width) + rows * kGatedPanels * 16 * 2 * 4;
  for (std::vector<uint8_t>& s : scratch_)
    if (s.size() < bytes) s.resize(bytes);
}

// Lets the norm that made x prepare its rows, if it came right before and any matrix of `op` wants that.
void Program::chain(Op& op, View x) {
  if (ops_.size() < 2) return;
  Op& before = ops_[ops_.size() - 2];
  const bool norm = before.code == OpCode::kRmsNorm || before.code == OpCode::kAddRmsNorm;
  if (!norm || before.out.buffer != x.buffer || before.out.offset != x.offset || before.out.width != x.width) return;
  for (const LinearPart& p : op.parts) op.is_prepared = op.is_prepared || kernels_->wants_prepared(matrices_[p.matrix]);
  before.prepares = op.is_prepared;
}

void Program::head_norm(View x, int head_dim, int weight, float eps) {
  check(x, "head_norm");
  require(head_dim > 0 && x.width % head_dim == 0, "head_norm: width is not a multiple of head_dim");
  check_vector(weight, head_dim, "head_norm");
  Op& op = append(OpCode::kHeadNorm);
  op.a = x;
  op.index = weight;
  op.size = head_dim;
  op.number = eps;
}

void Program::rope(View x, int head_dim) {
  check(x, "rope");
  require(head_dim > 0 && head_dim == 2 * rope_half_ && x.width % head_dim == 0,
          "rope: head_dim does not match the table");
  Op& op = append(OpCode::kRope);
  op.a = x;
  op.size = head_dim;
}

void Program::attention(View q, View k, View v, int layer, int window, float scale, View out) {
  check(q, "attention");
  check(k, "attention");
  check(v, "attention");
  check(out, "attention");
  const int kv_width = kv_.heads * kv_.head_dim;
  require(kv_width > 0 && k.width == kv_width && v.width == kv_width && q.width % kv_width == 0 && out.width == q.width,
          "attention: widths do not match the KV shape");
  require(layer >= 0 && layer < kv_.layers && window >= 0, "attention: no such layer or window");
  Op& op = append(OpCode::kAttention);
  op.a = q;
  op.b = k;
  op.c = v;
  op.out = out;
  op.index = layer;
  op.size = window;
  op.number = scale;
  const size_t bytes = kernels_->attention_scratch_bytes(q.width / kv_width, kv_.head_dim);
  for (std::vector<uint8_t>& s : scratch_)
    if (s.size() < bytes) s.resize(bytes);
}

void Program::gather(View x, View out) {
  check(x, "gather");
  check(out, "gather");
  require(gather_at_ < 0 && x.width == out.width && buffers_[out.buffer].outputs, "gather: once, into rows of outputs");
  gather_at_ = (int)ops_.size();
  Op& op = append(OpCode::kGather);
  op.a = x;
  op.out = out;
}

void Program::sample(View logits) {
  check(logits, "sample");
  Op& op = append(OpCode::kSample);
  op.a = logits;
  const size_t bytes = sampler_scratch_bytes(logits.width);
  for (std::vector<uint8_t>& s : scratch_)
    if (s.size() < bytes) s.resize(bytes);
}

// ---- running

template <class F>
void Program::for_rows(int rows, int cost, const F& f) {
  // `cost` is roughly the floats touched per row: small loops stay on this thread.
  if (rows < kParallelRows || (int64_t)rows * cost < 16384) {
    for (int r = 0; r < rows; ++r) f(r, 0);
    return;
  }
  const int step = std::max(1, std::min(16, rows / (4 * pool_.size())));
  pool_.run((rows + step - 1) / step, [&](int64_t item, int thread) {
    const int end = std::min(rows, (int)(item + 1) * step);
    for (int r = (int)item * step; r < end; ++r) f(r, thread);
  });
}

void Program::copy_blocks(const StepInput& in) {
  const size_t size = kv_block_head_bytes(kv_.head_dim, kv_.wide) * kv_.heads;
  for (int c = 0; c < in.num_copies; ++c)
    for (int layer = 0; layer < kv_.layers; ++layer)
      memcpy(kv_at(layer, in.copies[2 * c + 1], 0), kv_at(layer, in.copies[2 * c], 0), size);
}

void Program::plan_tiles(const StepInput& in) {
  tiles_.clear();
  for (int row = 0; row < in.num_rows; ++row)
    for (int t = in.row_start[row]; t < in.row_start[row + 1]; t += kTileTokens)
      tiles_.push_back({row, t, std::min(kTileTokens, in.row_start[row + 1] - t), in.positions[t]});
  // Longest first, so that no thread is left alone with a long one at the end. Does not touch any result.
  std::stable_sort(tiles_.begin(), tiles_.end(), [](const Tile& a, const Tile& b) {
    return (int64_t)a.num_tokens * (a.first_pos + a.num_tokens) > (int64_t)b.num_tokens * (b.first_pos + b.num_tokens);
  });
}

void Program::execute(const StepInput& in) {
  copy_blocks(in);
  plan_tiles(in);
  const int split = gather_at_ < 0 ? (int)ops_.size() : gather_at_;
  const auto timed = [&](const Op& op, int rows, int first_output) {
    const double start = seconds_now();
    run(op, in, rows, first_output);
    op_seconds_[(int)op.code] += seconds_now() - start;
  };
  for (int i = 0; i < split; ++i) timed(ops_[i], in.num_tokens, 0);
  for (int first = 0; first < in.num_outputs; first += output_rows_)
    for (int i = split; i < (int)ops_.size(); ++i)
      timed(ops_[i], std::min(output_rows_, in.num_outputs - first), first);
}

void Program::run(const Op& op, const StepInput& in, int rows, int first_output) {
  const Kernels& k = *kernels_;
  switch (op.code) {
    case OpCode::kEmbedding: {
      const Table& t = tables_[op.index];
      for_rows(rows, t.width, [&](int r, int) {
        unpack_row(*t.format, t.data + (size_t)in.token_ids[r] * t.row_bytes, t.width, at(op.out, r));
      });
      break;
    }
    case OpCode::kRmsNorm:
      for_rows(rows, op.a.width, [&](int r, int) {
        k.rms_norm(at(op.a, r), vectors_[op.index].data(), op.a.width, op.number, at(op.out, r));
        if (op.prepares) prepare_row(op.out, r);
      });
      break;
    case OpCode::kAddRmsNorm:
      for_rows(rows, op.a.width, [&](int r, int) {
        k.add_rms_norm(at(op.a, r), at(op.b, r), vectors_[op.index].data(), op.a.width, op.number, at(op.out, r));
        if (op.prepares) prepare_row(op.out, r);
      });
      break;
    case OpCode::kAdd:
      for_rows(rows, op.a.width, [&](int r, int) { k.add(at(op.a, r), at(op.b, r), op.a.width); });
      break;
    case OpCode::kLinear:
      run_linear(op, rows);
      break;
    case OpCode::kGatedLinear:
      run_gated_linear(op, rows);
      break;
    case OpCode::kHeadNorm:
      for_rows(rows, op.a.width, [&](int r, int) {
        for (int h = 0; h < op.a.width; h += op.size)
          k.rms_norm(at(op.a, r) + h, vectors_[op.index].data(), op.size, op.number, at(op.a, r) + h);
      });
      break;
    case OpCode::kRope:
      for_rows(rows, op.a.width, [&](int r, int) {
        const size_t angle = (size_t)in.positions[r] * rope_half_;
        k.rope(at(op.a, r), op.a.width / op.size, op.size, cos_.data() + angle, sin_.data() + angle);
      });
      break;
    case OpCode::kAttention:
      run_attention(op, in);
      break;
    case OpCode::kGather:
      for (int r = 0; r < rows; ++r)
        memcpy(at(op.out, r), at(op.a, in.output_tokens[first_output + r]), (size_t)op.a.width * 4);
      break;
    case OpCode::kSample:
      run_sample(op, in, rows, first_output);
      break;
    case OpCode::kCount:
      break;
  }
}

void Program::prepare_row(View x, int row) {
  kernels_->prepare_row(at(x, row), x.width, (uint16_t*)prepared_.get() + row * prepared_stride(x.width),
                        sums_.data() + row * sums_per_row(x.width));
}

void Program::prepare_input(const Op& op, int rows) {
  if (op.is_prepared) return;
  bool wanted = false;
  for (const LinearPart& p : op.parts) wanted = wanted || kernels_->wants_prepared(matrices_[p.matrix]);
  if (wanted) for_rows(rows, op.a.width, [&](int r, int) { prepare_row(op.a, r); });
}

LinearArgs Program::linear_args(const Op& op, int matrix, const float* bias, int rows) const {
  LinearArgs args{};
  args.w = &matrices_[matrix];
  args.bias = bias;
  args.x = at(op.a, 0);
  args.ldx = stride(op.a);
  args.prepared = (const uint16_t*)prepared_.get();
  args.ld_prepared = prepared_stride(op.a.width);
  args.sums = sums_.data();
  args.ld_sums = sums_per_row(op.a.width);
  args.offset32 = (op.a.width + 31) / 32 * 2;
  args.rows = rows;
  return args;
}

void Program::run_linear(const Op& op, int rows) {
  prepare_input(op, rows);
  int panels = 0;
  for (const LinearPart& p : op.parts) panels += matrices_[p.matrix].panels;
  // Panels per item: few enough items to be cheap, enough of them to balance the threads.
  int step = rows <= 16 ? 4 : 2;
  while (panels > step * pool_.size() * 32) step *= 2;
  int items = 0;
  for (const LinearPart& p : op.parts) items += (matrices_[p.matrix].panels + step - 1) / step;
  pool_.run(items, [&](int64_t item, int thread) {
    for (const LinearPart& p : op.parts) {
      const PackedMatrix& m = matrices_[p.matrix];
      const int64_t here = (m.panels + step - 1) / step;
      if (item >= here) {
        item -= here;
        continue;
      }
      LinearArgs args = linear_args(op, p.matrix, op.bias >= 0 ? vectors_[op.bias].data() + p.column : nullptr, rows);
      args.y = at(op.out, 0) + p.column;
      args.ldy = stride(op.out);
      kernels_->linear(args, (int)item * step, std::min(m.panels, (int)(item + 1) * step), scratch_[thread].data());
      return;
    }
  });
}

// Gate and up of a few panels go to scratch, and only their product to memory: at 512 rows the two would not fit in
// the L2 cache.
void Program::run_gated_linear(const Op& op, int rows) {
  prepare_input(op, rows);
  const PackedMatrix& m = matrices_[op.parts[0].matrix];
  const size_t linear_bytes = (kernels_->linear_scratch_bytes(m.k) + 63) / 64 * 64;
  const int step = rows <= 16 ? kGatedPanels : kGatedPanels / 2;
  pool_.run((m.panels + step - 1) / step, [&](int64_t item, int thread) {
    const int begin = (int)item * step, end = std::min(m.panels, begin + step);
    const int64_t ld = (end - begin) * 16;
    float* const halves[2] = {(float*)(scratch_[thread].data() + linear_bytes),
                              (float*)(scratch_[thread].data() + linear_bytes) + rows * ld};
    for (int i = 0; i < 2; ++i) {
      const float* bias = op.bias >= 0 ? vectors_[op.bias].data() + i * m.n : nullptr;
      LinearArgs args = linear_args(op, op.parts[i].matrix, bias, rows);
      args.y = halves[i];
      args.ldy = ld;
      args.first_panel = begin;
      kernels_->linear(args, begin, end, scratch_[thread].data());
    }
    const int width = std::min(m.n - begin * 16, (int)ld);
    for (int r = 0; r < rows; ++r)
      kernels_->silu_mul(halves[0] + r * ld, halves[1] + r * ld, width, at(op.out, r) + begin * 16);
  });
}

void Program::run_attention(const Op& op, const StepInput& in) {
  const Kernels& k = *kernels_;
  const int head_dim = kv_.head_dim, group = op.a.width / (kv_.heads * head_dim);
  // All keys and values of the step are in their slots before any query looks: a chunk sees itself.
  const auto store = [&](int64_t item) {
    const int64_t row = item / kv_.heads;
    const int h = (int)(item % kv_.heads);
    const int32_t* table = in.block_ids + in.table_start[row];
    for (int t = in.row_start[row]; t < in.row_start[row + 1]; ++t) {
      const int block = table[in.positions[t] / kBlockTokens], offset = in.positions[t] % kBlockTokens;
      k.store_kv(at(op.b, t) + h * head_dim, at(op.c, t) + h * head_dim, head_dim, kv_.wide, kv_at(op.index, block, h),
                 offset);
    }
  };
  if (in.num_tokens < kParallelRows) {
    for (int i = 0; i < in.num_rows * kv_.heads; ++i) store(i);
  } else {
    pool_.run((int64_t)in.num_rows * kv_.heads, [&](int64_t item, int) { store(item); });
  }
  const size_t block_stride = kv_block_head_bytes(head_dim, kv_.wide) * kv_.heads;
  pool_.run((int64_t)tiles_.size() * kv_.heads, [&](int64_t item, int thread) {
    const Tile& tile = tiles_[(size_t)(item / kv_.heads)];
    const int head = (int)(item % kv_.heads);
    const AttentionTask task{at(op.a, tile.first_token) + head * group * head_dim,
                             stride(op.a),
                             at(op.out, tile.first_token) + head * group * head_dim,
                             stride(op.out),
                             kv_at(op.index, 0, head),
                             block_stride,
                             in.block_ids + in.table_start[tile.row],
                             tile.num_tokens,
                             group,
                             tile.first_pos,
                             op.size,
                             head_dim,
                             op.number};
    k.attention(task, kv_.wide, scratch_[thread].data());
  });
}

void Program::run_sample(const Op& op, const StepInput& in, int rows, int first_output) {
  pool_.run(rows, [&](int64_t r, int thread) {
    const int64_t i = first_output + r;
    kernels_->sample_row(at(op.a, r), in.samples[i], in.results + i, in.top_ids + i * in.top_stride,
                         in.top_logprobs + i * in.top_stride, scratch_[thread].data());
  });
}

}  // namespace octavo
