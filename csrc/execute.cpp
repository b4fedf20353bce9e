// Running an op program: one step, all ops in order, shared out among the pool's threads. See program.h.
#include <algorithm>
#include <chrono>
#include <cstring>

#include "program.h"

namespace octavo {
namespace {

// Rows that a loop must have before it is worth waking the other threads for a cheap op.
constexpr int kParallelRows = 8;

// Attention items per thread from which on they balance by themselves.
constexpr int kBusyItems = 4;

double seconds_now() {
  return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

}  // namespace

template <class F>
void Program::for_rows(int rows, int cost, const F& f) {
  // `cost` is roughly the floats touched per row: small loops stay on this thread.
  if (rows < kParallelRows || (int64_t)rows * cost < 4096) {
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
  const size_t size = kv_block_head_bytes(kv_.head_dim, kv_.type) * kv_.heads;
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

// Moves the rows of outputs to the front of the tail's inputs; false where all rows are wanted.
bool Program::pack_outputs(const StepInput& in) {
  if (in.all_rows || in.num_outputs >= in.num_tokens) return false;
  for (int i = 1; i < in.num_outputs; ++i)
    if (in.output_tokens[i] <= in.output_tokens[i - 1]) return false;  // a row would overwrite one still to be moved
  for (const View& v : tail_inputs_)
    for (int i = 0; i < in.num_outputs; ++i)
      if (in.output_tokens[i] != i) memcpy(at(v, i), at(v, in.output_tokens[i]), (size_t)v.width * 4);
  return true;
}

void Program::execute(const StepInput& all) {
  StepInput in = all;
  copy_blocks(in);
  plan_tiles(in);
  const auto timed = [&](const Op& op, int rows, int first_output) {
    const double start = seconds_now();
    run(op, in, rows, first_output);
    op_seconds_[(int)op.code] += seconds_now() - start;
  };
  const int split = gather_at_ < 0 ? (int)ops_.size() : gather_at_;
  int rows = in.num_tokens;
  for (int i = 0; i < split; ++i) {
    if (i == tail_at_ && pack_outputs(in)) {
      rows = in.num_outputs;
      in.output_tokens = in_order_.data();
    }
    timed(ops_[i], rows, 0);
  }
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
        if (op.prepares) prepare_row(op.out, r, op.prepares);
      });
      break;
    case OpCode::kAddRmsNorm:
      for_rows(rows, op.a.width, [&](int r, int) {
        k.add_rms_norm(at(op.a, r), at(op.b, r), vectors_[op.index].data(), op.a.width, op.number, at(op.out, r));
        if (op.prepares) prepare_row(op.out, r, op.prepares);
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

void Program::prepare_row(View x, int row, int preparation) {
  kernels_->prepare_row(at(x, row), x.width, preparation, (uint16_t*)prepared_.get() + row * prepared_stride(x.width),
                        (float*)sums_.get() + row * sums_per_row(x.width));
}

void Program::prepare_input(const Op& op, int rows) {
  const int wanted = preparation(op);
  if (wanted && !op.is_prepared) for_rows(rows, op.a.width, [&](int r, int) { prepare_row(op.a, r, wanted); });
  if (!(wanted & kAsInt8)) return;
  const int64_t ld = sums_per_row(op.a.width);
  LargeValue* values = large_.data();
  int32_t* channels = large_channels_.data();
  for (int b = 0; b < row_blocks(rows); ++b) {
    const RowRange range = row_range(rows, b);
    large_blocks_[b] = kernels_->gather_large((const float*)sums_.get() + range.begin * ld, ld, range.end - range.begin,
                                              values, channels, channel_of_.data());
    values += large_blocks_[b].num_values;
    channels += large_blocks_[b].num_channels;
  }
}

LinearArgs Program::linear_args(const Op& op, int matrix, const float* bias, RowRange rows) const {
  LinearArgs args{};
  args.w = &matrices_[matrix];
  args.bias = bias;
  args.x = at(op.a, rows.begin);
  args.ldx = stride(op.a);
  args.ld_prepared = prepared_stride(op.a.width);
  args.prepared = (const uint16_t*)prepared_.get() + rows.begin * args.ld_prepared;
  args.ld_sums = sums_per_row(op.a.width);
  args.sums = (const float*)sums_.get() + rows.begin * args.ld_sums;
  args.offset32 = (op.a.width + 31) / 32 * 2;
  if (!large_blocks_.empty()) args.large = large_blocks_[rows.block];
  args.rows = rows.end - rows.begin;
  return args;
}

// Calls f(rows, item, thread) for `items` shares of the output's columns times blocks of rows. A thread goes through
// the columns of one block of rows before it takes the next, which stays in its second cache.
template <class F>
void Program::for_row_blocks(int rows, int items, const F& f) {
  const int blocks = row_blocks(rows);
  pool_.run((int64_t)blocks * items,
            [&](int64_t i, int thread) { f(row_range(rows, (int)(i / items)), (int)(i % items), thread); });
}

// Few enough items to be cheap, enough of them to balance the threads.
int Program::panels_per_item(const Op& op, int rows) const {
  int panels = 0;
  for (const LinearPart& p : op.parts) panels += matrices_[p.matrix].panels;
  const int blocks = row_blocks(rows);
  int step = rows <= 16 ? 4 : 2;  // as many as the kernels take at a time
  while (panels * blocks >= step * pool_.size() * 32) step *= 2;
  return step;
}

void Program::run_linear(const Op& op, int rows) {
  prepare_input(op, rows);
  const int step = panels_per_item(op, rows);
  int items = 0;
  for (const LinearPart& p : op.parts) items += (matrices_[p.matrix].panels + step - 1) / step;
  for_row_blocks(rows, items, [&](RowRange range, int item, int thread) {
    for (const LinearPart& p : op.parts) {
      const PackedMatrix& m = matrices_[p.matrix];
      const int here = (m.panels + step - 1) / step;
      if (item >= here) {
        item -= here;
        continue;
      }
      LinearArgs args = linear_args(op, p.matrix, op.bias >= 0 ? vectors_[op.bias].data() + p.column : nullptr, range);
      args.y = at(op.out, range.begin) + p.column;
      args.ldy = stride(op.out);
      kernels_->linear(args, item * step, std::min(m.panels, (item + 1) * step), scratch_[thread].data());
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
  const int step = std::min(rows, kernels_->row_block) <= 128 ? kGatedPanels : kGatedPanels / 2;
  for_row_blocks(rows, (m.panels + step - 1) / step, [&](RowRange range, int item, int thread) {
    const int begin = item * step, end = std::min(m.panels, begin + step), num_rows = range.end - range.begin;
    const int64_t ld = (end - begin) * 16;
    float* const halves[2] = {(float*)(scratch_[thread].data() + linear_bytes),
                              (float*)(scratch_[thread].data() + linear_bytes) + num_rows * ld};
    for (int i = 0; i < 2; ++i) {
      const float* bias = op.bias >= 0 ? vectors_[op.bias].data() + i * m.n : nullptr;
      LinearArgs args = linear_args(op, op.parts[i].matrix, bias, range);
      args.y = halves[i];
      args.ldy = ld;
      args.first_panel = begin;
      kernels_->linear(args, begin, end, scratch_[thread].data());
    }
    const int width = std::min(m.n - begin * 16, (int)ld);
    for (int r = 0; r < num_rows; ++r)
      kernels_->silu_mul(halves[0] + r * ld, halves[1] + r * ld, width, at(op.out, range.begin + r) + begin * 16);
  });
}

void Program::run_attention(const Op& op, const StepInput& in) {
  const Kernels& k = *kernels_;
  const int head_dim = kv_.head_dim;
  // All keys and values of the step are in their slots before any query looks: a chunk sees itself.
  const auto store = [&](int64_t item) {
    const int64_t row = item / kv_.heads;
    const int h = (int)(item % kv_.heads);
    const int32_t* table = in.block_ids + in.table_start[row];
    for (int t = in.row_start[row]; t < in.row_start[row + 1]; ++t) {
      const int block = table[in.positions[t] / kBlockTokens], offset = in.positions[t] % kBlockTokens;
      k.store_kv(at(op.b, t) + h * head_dim, at(op.c, t) + h * head_dim, head_dim, kv_.type, kv_at(op.index, block, h),
                 offset);
    }
  };
  if (in.num_tokens < kParallelRows) {
    for (int i = 0; i < in.num_rows * kv_.heads; ++i) store(i);
  } else {
    pool_.run((int64_t)in.num_rows * kv_.heads, [&](int64_t item, int) { store(item); });
  }
  plan_spans(op);
  const int64_t items = (int64_t)span_items_.size();
  pool_.run(items, [&](int64_t item, int thread) {
    AttentionTask task = attention_task(op, in, span_items_[(size_t)item]);
    if (item + 1 < items) {
      const SpanItem& following = span_items_[(size_t)item + 1];
      const Tile& next = tiles_[(size_t)following.tile];
      task.next_kv = kv_at(op.index, 0, following.head);
      task.next_block_ids = in.block_ids + in.table_start[next.row];
      task.next_first_pos = next.first_pos;
      task.next_last_pos = next.first_pos + next.num_tokens - 1;
    }
    k.attention(task, kv_.type, scratch_[thread].data());
  });
  pool_.run((int64_t)merges_.size(),
            [&](int64_t i, int) { k.merge_spans(attention_task(op, in, merges_[(size_t)i])); });
}

// Whole tiles, head by head; where these are few for the threads, those of single tokens span by span.
void Program::plan_spans(const Op& op) {
  span_items_.clear();
  merges_.clear();
  const size_t floats = state_floats(query_group(op), kv_.head_dim);
  size_t states = 0;
  const bool few = (int64_t)tiles_.size() * kv_.heads < kBusyItems * pool_.size() && pool_.size() > 1;
  for (int i = 0; i < (int)tiles_.size(); ++i)
    for (int head = 0; head < kv_.heads; ++head) {
      AttentionTask t{};
      t.first_pos = tiles_[i].first_pos;
      t.num_tokens = tiles_[i].num_tokens;
      t.window = op.size;
      const int spans = last_span(t) - first_span(t) + 1;
      if (!few || t.num_tokens > 1 || spans == 1 || (states + spans) * floats > span_states_.size()) {
        span_items_.push_back({i, head, -1, 0});
        continue;
      }
      merges_.push_back({i, head, -1, states * floats});
      for (int s = 0; s < spans; ++s) span_items_.push_back({i, head, first_span(t) + s, states * floats});
      states += (size_t)spans;
    }
}

AttentionTask Program::attention_task(const Op& op, const StepInput& in, const SpanItem& item) {
  const Tile& tile = tiles_[(size_t)item.tile];
  const int head_dim = kv_.head_dim, group = query_group(op);
  AttentionTask task{};
  task.q = at(op.a, tile.first_token) + item.head * group * head_dim;
  task.ldq = stride(op.a);
  task.out = at(op.out, tile.first_token) + item.head * group * head_dim;
  task.ldo = stride(op.out);
  task.kv = kv_at(op.index, 0, item.head);
  task.block_stride = kv_block_head_bytes(head_dim, kv_.type) * kv_.heads;
  task.block_ids = in.block_ids + in.table_start[tile.row];
  task.num_tokens = tile.num_tokens;
  task.group = group;
  task.first_pos = tile.first_pos;
  task.window = op.size;
  task.head_dim = head_dim;
  task.scale = op.number;
  task.span = item.span;
  task.states = span_states_.data() + item.states;
  return task;
}

void Program::run_sample(const Op& op, const StepInput& in, int rows, int first_output) {
  pool_.run(rows, [&](int64_t r, int thread) {
    const int64_t i = first_output + r;
    kernels_->sample_row(at(op.a, r), in.samples[i], in.results + i, in.top_ids + i * in.top_stride,
                         in.top_logprobs + i * in.top_stride, scratch_[thread].data());
  });
}

}  // namespace octavo
