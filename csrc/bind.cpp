// The Python module octavo._native: every check on what comes from Python is made here.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstring>
#include <map>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "bind_bench.h"
#include "bind_sampler.h"
#include "formats.h"
#include "kernels.h"
#include "program.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace octavo {
namespace {

template <class T>
using Array1 = nb::ndarray<const T, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
template <class T>
using Array2 = nb::ndarray<const T, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

void require(bool ok, const char* message) {
  if (!ok) throw nb::value_error(message);
}

const FormatInfo& format_named(const std::string& name) {
  const FormatInfo* info = find_format(name);
  if (info == nullptr) throw nb::value_error(("unknown weight format " + name).c_str());
  return *info;
}

const Kernels* kernels_named(const std::string& isa) {
  const Kernels* k = kernels_for(isa == "auto" ? best_isa() : isa.c_str());
  if (k == nullptr) throw nb::value_error(("this machine has no kernels for " + isa).c_str());
  return k;
}

void check_matrix(const FormatInfo& info, const Array1<uint8_t>& data, int64_t rows, int64_t cols) {
  require(rows > 0 && cols > 0 && rows < (1 << 28) && cols < (1 << 28), "a matrix needs at least one row and column");
  require(cols % info.block_len == 0, "columns are not a multiple of the format's block");
  require((int64_t)data.size() == rows * (cols / info.block_len) * info.block_bytes, "data does not match the shape");
}

// A new numpy array that owns its memory.
template <class T>
nb::ndarray<nb::numpy, T> make_array(std::vector<T>&& values, std::vector<size_t> shape) {
  auto* owned = new std::vector<T>(std::move(values));
  nb::capsule owner(owned, [](void* p) noexcept { delete (std::vector<T>*)p; });
  return nb::ndarray<nb::numpy, T>(owned->data(), shape.size(), shape.data(), owner);
}

// Columns of the `ints` array of a step's samples, in order.
enum SampleColumn {
  kTopK,
  kSampleIndex,
  kPosition,
  kNumLogprobs,
  kDraw,
  kTarget,
  kPromptStart,
  kPromptLen,
  kOutputStart,
  kOutputLen,
  kBannedStart,
  kBannedLen,
  kBiasStart,
  kBiasLen,
  kSampleColumns
};

struct StepArrays {
  Array1<int32_t> token_ids, positions, row_start, table_start, block_ids;
  Array2<int32_t> copies;
  Array1<int32_t> output_tokens;
  Array2<float> floats;    // [outputs][6] temperature, top_p, min_p, presence, frequency, repetition
  Array2<int32_t> ints;    // [outputs][kSampleColumns]
  Array1<uint64_t> seeds;  // [outputs]
  Array1<int32_t> ids;     // pool that the starts in `ints` point into
  Array1<float> bias_values;
  // Both or neither. Row of `masks` for each output, -1: all allowed; [masks][at least ceil(vocab_size / 32)].
  std::optional<Array1<int32_t>> mask_rows;
  std::optional<Array2<uint32_t>> masks;
};

void check_rows(const Program& p, const StepArrays& s) {
  const int num_tokens = (int)s.token_ids.size(), num_rows = (int)s.row_start.size() - 1;
  require(num_tokens > 0 && num_tokens <= p.max_tokens(), "a step needs between one token and the budget");
  require(s.positions.size() == s.token_ids.size() && num_rows > 0, "positions and rows must match the tokens");
  require(s.table_start.size() == s.row_start.size(), "every row needs a block table");
  for (int t = 0; t < num_tokens; ++t) {
    require(s.token_ids(t) >= 0 && s.token_ids(t) < p.vocab_size(), "token id outside the vocabulary");
    require(s.positions(t) >= 0 && s.positions(t) < p.num_positions(), "position outside the context");
  }
  require(s.row_start(0) == 0 && s.row_start(num_rows) == num_tokens && s.table_start(0) == 0 &&
              s.table_start(num_rows) == (int)s.block_ids.size(),
          "rows must cover all tokens and block tables");
  for (int r = 0; r < num_rows; ++r) {
    require(s.row_start(r) < s.row_start(r + 1) && s.table_start(r) <= s.table_start(r + 1), "rows must not be empty");
    for (int t = s.row_start(r); t < s.row_start(r + 1); ++t)
      require(s.positions(t) == s.positions(s.row_start(r)) + t - s.row_start(r),
              "positions of a row must be consecutive");
    require(s.positions(s.row_start(r + 1) - 1) / kBlockTokens < s.table_start(r + 1) - s.table_start(r),
            "a block table is too short for its row");
  }
  for (size_t b = 0; b < s.block_ids.size(); ++b)
    require(s.block_ids(b) >= 0 && s.block_ids(b) < p.num_kv_blocks(), "block id outside the pool");
  require(s.copies.shape(1) == 2, "copies are pairs of block ids");
  for (size_t c = 0; c < s.copies.shape(0); ++c)
    for (int i = 0; i < 2; ++i)
      require(s.copies(c, i) >= 0 && s.copies(c, i) < p.num_kv_blocks(), "copied block outside the pool");
}

std::vector<SampleRow> make_samples(const StepArrays& s, int num_tokens, int vocab_size, int* top_stride) {
  const size_t n = s.output_tokens.size();
  require(s.floats.shape(0) == n && s.ints.shape(0) == n && s.seeds.size() == n && s.floats.shape(1) == 6 &&
              s.ints.shape(1) == kSampleColumns && s.bias_values.size() == s.ids.size(),
          "sampling arrays must match");
  require(s.masks.has_value() == s.mask_rows.has_value(), "masks need the rows that they are for");
  if (s.masks)
    require(s.mask_rows->size() == n && (int64_t)s.masks->shape(1) * 32 >= vocab_size,
            "masks need a bit for every token and a row for every output");
  const auto range = [&](size_t i, int start, int len) {
    const int64_t first = s.ints(i, start), count = s.ints(i, len);
    require(first >= 0 && count >= 0 && first + count <= (int64_t)s.ids.size(), "sampling ids outside their pool");
    return s.ids.data() + first;
  };
  std::vector<SampleRow> rows(n);
  *top_stride = 0;
  for (size_t i = 0; i < n; ++i) {
    SampleRow& r = rows[i];
    require(s.output_tokens(i) >= 0 && s.output_tokens(i) < num_tokens, "output row outside the step");
    r.temperature = s.floats(i, 0);
    r.top_p = s.floats(i, 1);
    r.min_p = s.floats(i, 2);
    r.presence_penalty = s.floats(i, 3);
    r.frequency_penalty = s.floats(i, 4);
    r.repetition_penalty = s.floats(i, 5);
    r.top_k = s.ints(i, kTopK);
    r.seed = s.seeds(i);
    r.sample_index = (uint32_t)s.ints(i, kSampleIndex);
    r.position = (uint32_t)s.ints(i, kPosition);
    r.num_logprobs = s.ints(i, kNumLogprobs);
    require(r.num_logprobs >= -1 && r.num_logprobs <= 1024, "number of logprobs out of range");
    r.sample = s.ints(i, kDraw) != 0;
    r.target = s.ints(i, kTarget);
    r.prompt_ids = range(i, kPromptStart, kPromptLen);
    r.num_prompt_ids = s.ints(i, kPromptLen);
    r.output_ids = range(i, kOutputStart, kOutputLen);
    r.num_output_ids = s.ints(i, kOutputLen);
    r.banned_ids = range(i, kBannedStart, kBannedLen);
    r.num_banned_ids = s.ints(i, kBannedLen);
    r.bias_ids = range(i, kBiasStart, kBiasLen);
    r.bias_values = s.bias_values.data() + s.ints(i, kBiasStart);
    r.num_bias = s.ints(i, kBiasLen);
    const int mask = s.masks ? (*s.mask_rows)(i) : -1;
    require(mask >= -1 && (mask < 0 || mask < (int64_t)s.masks->shape(0)), "no such mask");
    if (mask >= 0) r.mask = s.masks->data() + (int64_t)mask * s.masks->shape(1);
    r.vocab_size = vocab_size;
    if (r.num_logprobs > *top_stride) *top_stride = r.num_logprobs;
  }
  return rows;
}

nb::tuple execute(Program& p, int vocab_size, Array1<int32_t> token_ids, Array1<int32_t> positions,
                  Array1<int32_t> row_start, Array1<int32_t> table_start, Array1<int32_t> block_ids,
                  Array2<int32_t> copies, Array1<int32_t> output_tokens, Array2<float> floats, Array2<int32_t> ints,
                  Array1<uint64_t> seeds, Array1<int32_t> ids, Array1<float> bias_values,
                  std::optional<Array1<int32_t>> mask_rows, std::optional<Array2<uint32_t>> masks, bool all_rows) {
  const StepArrays s{token_ids, positions, row_start, table_start, block_ids,   copies,    output_tokens,
                     floats,    ints,      seeds,     ids,         bias_values, mask_rows, masks};
  check_rows(p, s);
  int top_stride = 0;
  const std::vector<SampleRow> samples = make_samples(s, (int)token_ids.size(), vocab_size, &top_stride);
  const size_t n = samples.size();
  std::vector<SampleOut> results(n);
  std::vector<int32_t> top_ids(n * top_stride, -1);
  std::vector<float> top_logprobs(n * top_stride);
  StepInput in{(int)token_ids.size(),
               token_ids.data(),
               positions.data(),
               (int)row_start.size() - 1,
               row_start.data(),
               table_start.data(),
               block_ids.data(),
               (int)copies.shape(0),
               copies.data(),
               (int)n,
               output_tokens.data(),
               samples.data(),
               top_stride,
               results.data(),
               top_ids.data(),
               top_logprobs.data(),
               all_rows};
  {
    nb::gil_scoped_release release;
    p.execute(in);
  }
  std::vector<int32_t> tokens(n), status(n), ranks(n);
  std::vector<float> logprobs(n);
  for (size_t i = 0; i < n; ++i) {
    tokens[i] = results[i].token;
    status[i] = results[i].status;
    logprobs[i] = results[i].logprob;
    ranks[i] = results[i].rank;
  }
  return nb::make_tuple(make_array(std::move(tokens), {n}), make_array(std::move(status), {n}),
                        make_array(std::move(logprobs), {n}), make_array(std::move(ranks), {n}),
                        make_array(std::move(top_ids), {n, (size_t)top_stride}),
                        make_array(std::move(top_logprobs), {n, (size_t)top_stride}));
}

using PyView = std::vector<int>;

View to_view(const PyView& v) {
  require(v.size() == 3, "a view is (buffer, offset, width)");
  return {v[0], v[1], v[2]};
}

void bind_program(nb::module_& m) {
  nb::class_<Program>(m, "Program")
      .def(
          "__init__",
          [](Program* self, const std::string& isa, int threads, int max_tokens, int max_outputs) {
            require(threads >= 1 && threads <= 1024 && max_tokens >= 1 && max_outputs >= 1, "sizes must be positive");
            new (self) Program(kernels_named(isa), threads, max_tokens, max_outputs);
          },
          "isa"_a, "threads"_a, "max_tokens"_a, "max_outputs"_a)
      .def("pin_workers", [](Program& p, const std::vector<std::vector<int>>& cpus) { p.pool().pin_workers(cpus); })
      .def("add_matrix",
           [](Program& p, const std::string& format, Array1<uint8_t> data, int rows, int cols) {
             const FormatInfo& info = format_named(format);
             check_matrix(info, data, rows, cols);
             nb::gil_scoped_release release;
             return p.add_matrix(info, data.data(), rows, cols);
           })
      .def(
          "add_table",
          [](Program& p, const std::string& format, Array1<uint8_t> data, int rows, int cols) {
            const FormatInfo& info = format_named(format);
            check_matrix(info, data, rows, cols);
            return p.add_table(info, data.data(), rows, cols);
          },
          nb::keep_alive<1, 3>())
      .def("add_vector", [](Program& p, Array1<float> v) { return p.add_vector(v.data(), (int)v.size()); })
      .def("add_buffer",
           [](Program& p, int width, bool outputs) {
             require(width > 0, "a buffer needs at least one column");
             return p.add_buffer(width, outputs);
           })
      .def("set_rope",
           [](Program& p, Array2<float> cos, Array2<float> sin) {
             require(cos.shape(0) == sin.shape(0) && cos.shape(1) == sin.shape(1) && cos.shape(0) > 0,
                     "cos and sin must match");
             p.set_rope(cos.data(), sin.data(), (int)cos.shape(0), (int)cos.shape(1));
           })
      .def("set_kv_shape",
           [](Program& p, int layers, int heads, int head_dim, const std::string& dtype) {
             require(layers > 0 && heads > 0 && head_dim > 0, "the KV shape must be positive");
             const KvType type = dtype == "float32" ? KvType::kF32 : dtype == "int8" ? KvType::kInt8 : KvType::kBf16;
             require(type != KvType::kBf16 || dtype == "bfloat16",
                     "set_kv_shape: dtype is none of bfloat16, float32, int8");
             p.set_kv_shape({layers, heads, head_dim, type});
           })
      .def(
          "allocate_kv",
          [](Program& p, int num_blocks, bool poison) {
            require(num_blocks > 0, "the pool needs at least one block");
            p.allocate_kv(num_blocks, poison);
          },
          "num_blocks"_a, "poison"_a = false)
      .def("embedding", [](Program& p, int table, PyView out) { p.embedding(table, to_view(out)); })
      .def("rms_norm",
           [](Program& p, PyView x, int w, float eps, PyView out) { p.rms_norm(to_view(x), w, eps, to_view(out)); })
      .def("add_rms_norm", [](Program& p, PyView x, PyView delta, int w, float eps,
                              PyView out) { p.add_rms_norm(to_view(x), to_view(delta), w, eps, to_view(out)); })
      .def("add", [](Program& p, PyView x, PyView delta) { p.add(to_view(x), to_view(delta)); })
      .def("linear",
           [](Program& p, PyView x, const std::vector<std::pair<int, int>>& parts, int bias, PyView out) {
             std::vector<LinearPart> list;
             for (auto [matrix, column] : parts) list.push_back({matrix, column});
             p.linear(to_view(x), std::move(list), bias, to_view(out));
           })
      .def("gated_linear", [](Program& p, PyView x, int gate, int up, int bias,
                              PyView out) { p.gated_linear(to_view(x), gate, up, bias, to_view(out)); })
      .def("head_norm",
           [](Program& p, PyView x, int head_dim, int w, float eps) { p.head_norm(to_view(x), head_dim, w, eps); })
      .def("rope", [](Program& p, PyView x, int head_dim) { p.rope(to_view(x), head_dim); })
      .def("attention",
           [](Program& p, PyView q, PyView k, PyView v, int layer, int window, float scale, PyView out) {
             p.attention(to_view(q), to_view(k), to_view(v), layer, window, scale, to_view(out));
           })
      .def("gather", [](Program& p, PyView x, PyView out) { p.gather(to_view(x), to_view(out)); })
      .def("sample", [](Program& p, PyView logits) { p.sample(to_view(logits)); })
      .def("execute", &execute, nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(),
           nb::arg(), nb::arg(), nb::arg(), nb::arg(), nb::arg(), "mask_rows"_a = nb::none(), "masks"_a = nb::none(),
           "all_rows"_a = false)
      .def(
          "buffer",
          [](Program& p, int i) {
            require(i >= 0, "no such buffer");
            const size_t shape[2] = {(size_t)p.buffer_rows(i), (size_t)p.buffer_width(i)};
            const int64_t strides[2] = {p.buffer_stride(i), 1};
            return nb::ndarray<nb::numpy, float>(p.buffer_data(i), 2, shape, nb::find(&p), strides);
          },
          "A view of a buffer's memory: float32 [rows][width].")
      .def_prop_ro("isa", [](const Program& p) { return std::string(const_cast<Program&>(p).kernels().isa); })
      .def_prop_ro("num_threads", &Program::num_threads)
      .def_prop_ro("num_ops", &Program::num_ops)
      .def_prop_ro("weight_bytes", &Program::weight_bytes)
      .def_prop_ro("kv_bytes_per_block", &Program::kv_bytes_per_block)
      .def_prop_ro("op_seconds", [](const Program& p) {
        nb::dict out;
        for (int i = 0; i < (int)OpCode::kCount; ++i) out[kOpNames[i]] = p.op_seconds()[i];
        return out;
      });
}

void bind_formats(nb::module_& m) {
  m.def(
      "unpack",
      [](const std::string& format, Array1<uint8_t> data, int rows, int cols) {
        const FormatInfo& info = format_named(format);
        check_matrix(info, data, rows, cols);
        std::vector<float> out((size_t)rows * cols);
        const size_t row_bytes = (size_t)(cols / info.block_len) * info.block_bytes;
        for (int r = 0; r < rows; ++r)
          unpack_row(info, data.data() + r * row_bytes, cols, out.data() + (size_t)r * cols);
        return make_array(std::move(out), {(size_t)rows, (size_t)cols});
      },
      "format"_a, "data"_a, "rows"_a, "cols"_a, "Floats of a matrix as stored in a checkpoint: float32 [rows][cols].");
  m.def(
      "unpack_repacked",
      [](const std::string& isa, const std::string& format, Array1<uint8_t> data, int rows, int cols) {
        const FormatInfo& info = format_named(format);
        const Kernels* k = kernels_named(isa);
        check_matrix(info, data, rows, cols);
        Arena arena;
        PackedMatrix packed = make_packed(info, rows, cols, k->eight_bits, arena);
        std::vector<float> out((size_t)rows * cols), panel((size_t)cols * 16);
        for (int p = 0; p < packed.panels; ++p) {
          pack_panel(packed, info, data.data(), p);
          k->unpack_panel(packed, p, panel.data());
          for (int c = 0; c < 16 && p * 16 + c < rows; ++c)
            for (int i = 0; i < cols; ++i) out[(size_t)(p * 16 + c) * cols + i] = panel[(size_t)i * 16 + c];
        }
        return make_array(std::move(out), {(size_t)rows, (size_t)cols});
      },
      "isa"_a, "format"_a, "data"_a, "rows"_a, "cols"_a,
      "Floats of a matrix after packing it as the kernels read it: float32 [rows][cols].");
}

}  // namespace
}  // namespace octavo

NB_MODULE(_native, m) {
  m.doc() = "Octavo's CPU kernels and op program.";
  octavo::bind_formats(m);
  octavo::bind_program(m);
  octavo::bind_sampler(m);
  octavo::bind_bench(m);
  m.def(
      "known_isas",
      [] {
        std::vector<std::string> names;
        for (const char* const* isa = octavo::known_isas(); *isa != nullptr; ++isa) names.push_back(*isa);
        return names;
      },
      "Instruction sets that kernels exist for, from the most portable to the fastest.");
  m.def(
      "available_isas",
      [] {
        std::vector<std::string> names;
        for (const char* const* isa = octavo::known_isas(); *isa != nullptr; ++isa)
          if (octavo::kernels_for(*isa) != nullptr) names.push_back(*isa);
        return names;
      },
      "Those of known_isas() that this machine can run.");
}
