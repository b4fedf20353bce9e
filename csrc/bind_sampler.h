// Python face of the sampler, for tests: whole matrices of logits, parameters as dicts, all checks here.
#pragma once

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "kernels.h"
#include "sampler.h"

namespace octavo {

namespace nb = nanobind;

using LogitRows = nb::ndarray<const float, nb::ndim<2>, nb::c_contig, nb::device::cpu>;

// Owns the lists that a SampleRow points to.
struct SampleRowHolder {
  SampleRow row;
  std::vector<int32_t> prompt_ids, output_ids, banned_ids, bias_ids;
  std::vector<float> bias_values;
  std::vector<uint32_t> mask;
};

template <class T>
inline std::vector<T> sampler_list(nb::handle value, const char* name) {
  std::vector<T> out;
  for (nb::handle item : value) {
    T element;
    if (!nb::try_cast<T>(item, element)) throw nb::type_error((std::string(name) + " must hold numbers").c_str());
    out.push_back(element);
  }
  return out;
}

template <class T>
inline void sampler_scalar(nb::handle value, const char* name, T* out) {
  if (!nb::try_cast<T>(value, *out)) throw nb::type_error((std::string(name) + " has the wrong type").c_str());
}

// Keys are the fields of SampleRow; the lists are prompt_ids, output_ids, banned_ids, bias_ids,
// bias_values and mask. An unknown key is an error.
inline void read_sample_row(nb::dict params, int32_t vocab_size, SampleRowHolder* h) {
  SampleRow& r = h->row;
  r.vocab_size = vocab_size;
  for (auto [key, value] : params) {
    const std::string name = nb::cast<std::string>(key);
    const char* at = name.c_str();
    if (name == "temperature")
      sampler_scalar(value, at, &r.temperature);
    else if (name == "top_p")
      sampler_scalar(value, at, &r.top_p);
    else if (name == "min_p")
      sampler_scalar(value, at, &r.min_p);
    else if (name == "presence_penalty")
      sampler_scalar(value, at, &r.presence_penalty);
    else if (name == "frequency_penalty")
      sampler_scalar(value, at, &r.frequency_penalty);
    else if (name == "repetition_penalty")
      sampler_scalar(value, at, &r.repetition_penalty);
    else if (name == "top_k")
      sampler_scalar(value, at, &r.top_k);
    else if (name == "seed")
      sampler_scalar(value, at, &r.seed);
    else if (name == "sample_index")
      sampler_scalar(value, at, &r.sample_index);
    else if (name == "position")
      sampler_scalar(value, at, &r.position);
    else if (name == "num_logprobs")
      sampler_scalar(value, at, &r.num_logprobs);
    else if (name == "sample")
      sampler_scalar(value, at, &r.sample);
    else if (name == "target")
      sampler_scalar(value, at, &r.target);
    else if (name == "prompt_ids")
      h->prompt_ids = sampler_list<int32_t>(value, at);
    else if (name == "output_ids")
      h->output_ids = sampler_list<int32_t>(value, at);
    else if (name == "banned_ids")
      h->banned_ids = sampler_list<int32_t>(value, at);
    else if (name == "bias_ids")
      h->bias_ids = sampler_list<int32_t>(value, at);
    else if (name == "bias_values")
      h->bias_values = sampler_list<float>(value, at);
    else if (name == "mask")
      h->mask = sampler_list<uint32_t>(value, at);
    else
      throw nb::key_error("unknown sampling parameter");
  }
  if (h->bias_ids.size() != h->bias_values.size()) throw nb::value_error("bias_ids and bias_values differ in length");
  if (!h->mask.empty() && h->mask.size() < (static_cast<size_t>(vocab_size) + 31) / 32) {
    throw nb::value_error("mask needs a bit for every token");
  }
  if (r.num_logprobs < -1 || r.num_logprobs > 4096) throw nb::value_error("num_logprobs must lie between -1 and 4096");
  r.prompt_ids = h->prompt_ids.data();
  r.num_prompt_ids = static_cast<int32_t>(h->prompt_ids.size());
  r.output_ids = h->output_ids.data();
  r.num_output_ids = static_cast<int32_t>(h->output_ids.size());
  r.banned_ids = h->banned_ids.data();
  r.num_banned_ids = static_cast<int32_t>(h->banned_ids.size());
  r.bias_ids = h->bias_ids.data();
  r.bias_values = h->bias_values.data();
  r.num_bias = static_cast<int32_t>(h->bias_ids.size());
  r.mask = h->mask.empty() ? nullptr : h->mask.data();
}

// [(token, status, logprob, rank, top_ids, top_logprobs)], one per row.
inline nb::list sample_rows(const std::string& isa, LogitRows logits, nb::list params) {
  const Kernels* kernels = kernels_for(isa.c_str());
  if (kernels == nullptr) throw nb::value_error("no such instruction set on this machine");
  const size_t num_rows = logits.shape(0);
  if (nb::len(params) != num_rows) throw nb::value_error("one dict of parameters per row of logits is needed");
  if (logits.shape(1) == 0 || logits.shape(1) > (size_t{1} << 24)) throw nb::value_error("bad vocabulary size");
  const int32_t vocab_size = static_cast<int32_t>(logits.shape(1));
  // A byte off on purpose: the sampler asks no alignment of its scratch.
  std::vector<char> scratch(sampler_scratch_bytes(vocab_size) + 1);
  nb::list results;
  for (size_t i = 0; i < num_rows; ++i) {
    SampleRowHolder holder;
    read_sample_row(nb::cast<nb::dict>(params[i]), vocab_size, &holder);
    const size_t num_top = holder.row.num_logprobs > 0 ? static_cast<size_t>(holder.row.num_logprobs) : 0;
    std::vector<int32_t> top_ids(num_top);
    std::vector<float> top_logprobs(num_top);
    SampleOut out;
    kernels->sample_row(logits.data() + i * static_cast<size_t>(vocab_size), holder.row, &out, top_ids.data(),
                        top_logprobs.data(), scratch.data() + 1);
    nb::list ids, logprobs;
    if (out.status == kSampleOk) {
      for (size_t k = 0; k < num_top; ++k) {
        ids.append(top_ids[k]);
        logprobs.append(top_logprobs[k]);
      }
    }
    results.append(nb::make_tuple(out.token, out.status, out.logprob, out.rank, ids, logprobs));
  }
  return results;
}

inline void bind_sampler(nb::module_& m) {
  m.def("sample", &sample_rows, nb::arg("isa"), nb::arg("logits"), nb::arg("params"),
        "Runs the sampler of one instruction set over rows of float32 logits [rows, vocab]; for tests.");
  m.def(
      "sampler_isas",
      []() {
        nb::list names;
        for (const char* const* isa = known_isas(); *isa != nullptr; ++isa) {
          if (kernels_for(*isa) != nullptr) names.append(*isa);
        }
        return names;
      },
      "Instruction sets of this machine that have a sampler.");
  m.def(
      "philox4x32",
      [](uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
        const Philox4x32 r = philox4x32({{c0, c1, c2, c3}}, k0, k1);
        return nb::make_tuple(r.word[0], r.word[1], r.word[2], r.word[3]);
      },
      "Philox4x32-10 of one counter under one key; for tests.");
  m.def("sample_uniform", &sample_uniform, nb::arg("seed"), nb::arg("sample_index"), nb::arg("position"),
        "The uniform draw in [0, 1) that belongs to (seed, sample index, position).");
}

}  // namespace octavo
