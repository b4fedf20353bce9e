// Building an op program: its memory and the checks on every op. See program.h; execute.cpp runs it.
#include "program.h"

#include <sys/mman.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <new>
#include <numeric>
#include <stdexcept>

namespace octavo {

const char* const kOpNames[(int)OpCode::kCount] = {"embedding", "rms_norm",     "add_rms_norm", "add",
                                                   "linear",    "gated_linear", "head_norm",    "rope",
                                                   "attention", "gather",       "sample"};

namespace {

// Rows of logits computed at a time: bounds the logits buffer when many prompt positions are scored.
constexpr int kOutputRows = 64;

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

int Program::add_matrix(const FormatInfo& format, const uint8_t* data, int n, int k) {
  PackedMatrix m = make_packed(format, n, k, kernels_->eight_bits, arena_);
  std::atomic<bool> finite{true};
  pool_.run(m.panels, [&](int64_t p, int) {
    if (!pack_panel(m, format, data, (int)p)) finite = false;
  });
  m.finite_scales = finite;
  const size_t rows = (size_t)std::max(max_tokens_, output_rows_);
  const size_t scratch = std::max(kernels_->linear_scratch_bytes(k), (size_t)k * 64);
  for (std::vector<uint8_t>& s : scratch_)
    if (s.size() < scratch) s.resize(scratch);
  if (kernels_->preparation(m) != kAsFloat && prepared_width_ < k) {
    prepared_width_ = k;
    prepared_ = allocate_bytes(rows * (size_t)prepared_stride(k) * 2);
    sums_ = allocate_bytes(rows * (size_t)sums_per_row(k) * 4);
    large_.resize(rows * (size_t)large_per_row(k));
    large_channels_.resize(large_.size());
    channel_of_.resize((size_t)k, -1);
    large_blocks_.resize((size_t)row_blocks((int)rows));
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
  const int64_t stride = spread(padded16(width), 4);
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
  return (size_t)kv_.layers * kv_.heads * kv_block_head_bytes(kv_.head_dim, kv_.type);
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
  if (poison) memset(p, 0xff, kv_memory_bytes_);  // NaN, or NaN for a scale: reading an unwritten slot shows
}

uint8_t* Program::kv_at(int layer, int block, int head) const {
  const size_t size = kv_block_head_bytes(kv_.head_dim, kv_.type);
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
  const size_t at_once = std::min(rows, (size_t)kernels_->row_block);
  const size_t bytes = kernels_->linear_scratch_bytes(x.width) + at_once * kGatedPanels * 16 * 2 * 4;
  for (std::vector<uint8_t>& s : scratch_)
    if (s.size() < bytes) s.resize(bytes);
}

// Lets the norm that made x prepare its rows, if it came right before and any matrix of `op` wants that.
void Program::chain(Op& op, View x) {
  if (ops_.size() < 2) return;
  Op& before = ops_[ops_.size() - 2];
  const bool norm = before.code == OpCode::kRmsNorm || before.code == OpCode::kAddRmsNorm;
  if (!norm || before.out.buffer != x.buffer || before.out.offset != x.offset || before.out.width != x.width) return;
  before.prepares = preparation(op);
  op.is_prepared = before.prepares != kAsFloat;
}

int Program::preparation(const Op& op) const {
  int wanted = kAsFloat;
  for (const LinearPart& p : op.parts) wanted |= kernels_->preparation(matrices_[p.matrix]);
  return wanted;
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
  // One sequence of any length can be shared out among the threads, or several shorter ones.
  const size_t spans = (size_t)(rope_positions_ + kSpanTokens - 1) / kSpanTokens * (size_t)kv_.heads;
  const size_t floats =
      std::max(spans, (size_t)kSpansPerThread * pool_.size()) * state_floats(query_group(op), kv_.head_dim);
  if (span_states_.size() < floats) span_states_.resize(floats);
}

void Program::gather(View x, View out) {
  check(x, "gather");
  check(out, "gather");
  require(gather_at_ < 0 && x.width == out.width && buffers_[out.buffer].outputs, "gather: once, into rows of outputs");
  gather_at_ = (int)ops_.size();
  Op& op = append(OpCode::kGather);
  op.a = x;
  op.out = out;
  find_tail();
}

void Program::find_tail() {
  for (int i = 0; i < gather_at_; ++i)
    if (ops_[i].code == OpCode::kAttention) tail_at_ = i + 1;
  if (tail_at_ < 0) return;
  std::vector<int> written;
  const auto read = [&](const View& v) {
    if (std::find(written.begin(), written.end(), v.buffer) != written.end()) return;
    for (const View& known : tail_inputs_)
      if (known.buffer == v.buffer && known.offset == v.offset && known.width == v.width) return;
    tail_inputs_.push_back(v);
  };
  for (int i = tail_at_; i <= gather_at_; ++i) {
    const Op& op = ops_[i];
    read(op.a);
    if (op.code == OpCode::kAddRmsNorm || op.code == OpCode::kAdd) read(op.b);
    if (op.code != OpCode::kAdd) written.push_back(op.out.buffer);
  }
  in_order_.resize((size_t)max_tokens_);
  std::iota(in_order_.begin(), in_order_.end(), 0);
}

void Program::sample(View logits) {
  check(logits, "sample");
  Op& op = append(OpCode::kSample);
  op.a = logits;
  const size_t bytes = sampler_scratch_bytes(logits.width);
  for (std::vector<uint8_t>& s : scratch_)
    if (s.size() < bytes) s.resize(bytes);
}

}  // namespace octavo
