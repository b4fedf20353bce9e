// Decodes the block formats of GGUF (layouts as published in the ggml project's documentation of its
// quantisation types) and packs matrices into panels. Runs once, at load.
#include "formats.h"

#include <sys/mman.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <new>
#include <vector>

namespace octavo {
namespace {

const FormatInfo kFormats[] = {
    {"F32", Format::F32, 1, 4, 0, false, false, false},
    {"F16", Format::F16, 1, 2, 0, false, false, false},
    {"BF16", Format::BF16, 1, 2, 0, false, false, false},
    {"Q4_0", Format::Q4_0, 32, 18, 32, false, true, true},
    {"Q4_1", Format::Q4_1, 32, 20, 32, true, true, true},
    {"Q5_0", Format::Q5_0, 32, 22, 32, false, true, false},
    {"Q5_1", Format::Q5_1, 32, 24, 32, true, true, false},
    {"Q8_0", Format::Q8_0, 32, 34, 32, false, true, false},
    {"Q2_K", Format::Q2_K, 256, 84, 16, true, false, false},
    {"Q3_K", Format::Q3_K, 256, 110, 16, false, false, false},
    {"Q4_K", Format::Q4_K, 256, 144, 32, true, false, true},
    {"Q5_K", Format::Q5_K, 256, 176, 32, true, false, false},
    {"Q6_K", Format::Q6_K, 256, 210, 16, false, false, false},
};

uint16_t load16(const uint8_t* p) {
  uint16_t v;
  memcpy(&v, p, 2);
  return v;
}

uint32_t load32(const uint8_t* p) {
  uint32_t v;
  memcpy(&v, p, 4);
  return v;
}

float half_value(uint16_t h) {
  const uint32_t exponent = (h >> 10) & 31u, mantissa = h & 1023u;
  float value;
  if (exponent == 0) {
    value = (float)mantissa * 5.9604644775390625e-8f;  // 2^-24: subnormal or zero
  } else {
    const uint32_t bits =
        exponent == 31 ? (0x7f800000u | (mantissa << 13)) : ((exponent + 112u) << 23 | mantissa << 13);
    memcpy(&value, &bits, 4);
  }
  return (h & 0x8000u) ? -value : value;
}

// One block as integers and the scales of its groups: w = scale * q (+ min). Legacy formats give the
// half floats of the file (raw16), K formats the float products.
struct Decoded {
  int8_t q[256];
  float scale[16], min[16];
  uint16_t scale16, min16;
};

void decode_nibbles(const uint8_t* qs, int zero, Decoded& d) {
  for (int i = 0; i < 16; ++i) {
    d.q[i] = (int8_t)((qs[i] & 15) - zero);
    d.q[i + 16] = (int8_t)((qs[i] >> 4) - zero);
  }
}

void decode_five_bits(const uint8_t* qh, const uint8_t* qs, int zero, Decoded& d) {
  const uint32_t high = load32(qh);
  for (int i = 0; i < 16; ++i) {
    d.q[i] = (int8_t)(((qs[i] & 15) | ((high >> i) & 1u) << 4) - zero);
    d.q[i + 16] = (int8_t)(((qs[i] >> 4) | ((high >> (i + 16)) & 1u) << 4) - zero);
  }
}

// The eight 6-bit scales and minimums of Q4_K and Q5_K lie interleaved in 12 bytes.
void six_bit_scale(const uint8_t* s, int j, int& scale, int& min) {
  if (j < 4) {
    scale = s[j] & 63;
    min = s[j + 4] & 63;
  } else {
    scale = (s[j + 4] & 15) | (s[j - 4] >> 6) << 4;
    min = (s[j + 4] >> 4) | (s[j] >> 6) << 4;
  }
}

void decode_k45(const uint8_t* b, bool five, Decoded& d) {
  const float scale = half_value(load16(b)), min = half_value(load16(b + 2));
  const uint8_t* qh = b + 16;
  const uint8_t* qs = b + 16 + (five ? 32 : 0);
  for (int j = 0; j < 8; ++j) {
    int sc, mn;
    six_bit_scale(b + 4, j, sc, mn);
    d.scale[j] = scale * (float)sc;
    d.min[j] = -(min * (float)mn);
    for (int i = 0; i < 32; ++i) {
      const uint8_t byte = qs[(j / 2) * 32 + i];
      const int low = (j & 1) ? byte >> 4 : byte & 15;
      d.q[j * 32 + i] = (int8_t)(low | (five ? ((qh[i] >> j) & 1) << 4 : 0));
    }
  }
}

void decode_q2k(const uint8_t* b, Decoded& d) {
  const uint8_t* scales = b;
  const uint8_t* qs = b + 16;
  const float scale = half_value(load16(b + 80)), min = half_value(load16(b + 82));
  for (int j = 0; j < 16; ++j) {
    d.scale[j] = scale * (float)(scales[j] & 15);
    d.min[j] = -(min * (float)(scales[j] >> 4));
  }
  for (int i = 0; i < 256; ++i) d.q[i] = (int8_t)((qs[(i / 128) * 32 + i % 32] >> (2 * ((i / 32) % 4))) & 3);
}

void decode_q3k(const uint8_t* b, Decoded& d) {
  const uint8_t* high = b;
  const uint8_t* qs = b + 32;
  const uint8_t* s = b + 96;
  const float scale = half_value(load16(b + 108));
  for (int j = 0; j < 16; ++j) {
    const int low = j < 8 ? s[j] & 15 : s[j - 8] >> 4;
    const int top = (s[8 + j % 4] >> (2 * (j / 4))) & 3;
    d.scale[j] = scale * (float)((low | top << 4) - 32);
  }
  for (int i = 0; i < 256; ++i) {
    const int low = (qs[(i / 128) * 32 + i % 32] >> (2 * ((i / 32) % 4))) & 3;
    const int bit = (high[i % 32] >> (i / 32)) & 1;
    d.q[i] = (int8_t)(low - (bit ? 0 : 4));
  }
}

void decode_q6k(const uint8_t* b, Decoded& d) {
  const uint8_t* ql = b;
  const uint8_t* qh = b + 128;
  const int8_t* scales = (const int8_t*)(b + 192);
  const float scale = half_value(load16(b + 208));
  for (int j = 0; j < 16; ++j) d.scale[j] = scale * (float)scales[j];
  for (int i = 0; i < 256; ++i) {
    const int half = i / 128, r = i % 128, quarter = r / 32, l = r % 32;
    const uint8_t low = ql[half * 64 + (quarter & 1) * 32 + l];
    const int nibble = quarter < 2 ? low & 15 : low >> 4;
    const int top = (qh[half * 32 + l] >> (2 * quarter)) & 3;
    d.q[i] = (int8_t)((nibble | top << 4) - 32);
  }
}

void decode_block(Format format, const uint8_t* b, Decoded& d) {
  d.scale16 = load16(b);
  d.min16 = load16(b + 2);
  switch (format) {
    case Format::Q4_0:
      decode_nibbles(b + 2, 8, d);
      break;
    case Format::Q4_1:
      decode_nibbles(b + 4, 0, d);
      break;
    case Format::Q5_0:
      decode_five_bits(b + 2, b + 6, 16, d);
      break;
    case Format::Q5_1:
      decode_five_bits(b + 4, b + 8, 0, d);
      break;
    case Format::Q8_0:
      memcpy(d.q, b + 2, 32);
      break;
    case Format::Q2_K:
      decode_q2k(b, d);
      break;
    case Format::Q3_K:
      decode_q3k(b, d);
      break;
    case Format::Q4_K:
      decode_k45(b, false, d);
      break;
    case Format::Q5_K:
      decode_k45(b, true, d);
      break;
    case Format::Q6_K:
      decode_q6k(b, d);
      break;
    default:
      break;
  }
}

void pack_plain(PackedMatrix& m, const FormatInfo& info, const uint8_t* source, int p) {
  uint8_t* out = m.data.get() + (size_t)p * m.panel_bytes;
  memset(out, 0, m.panel_bytes);
  const size_t size = (size_t)info.block_bytes;
  for (int c = 0; c < 16 && p * 16 + c < m.n; ++c) {
    const uint8_t* row = source + (size_t)(p * 16 + c) * m.k * size;
    for (int k = 0; k < m.k; ++k) {
      const size_t at = m.form == Form::kF32 ? (size_t)k * 16 + c : ((size_t)(k / 2) * 16 + c) * 2 + k % 2;
      memcpy(out + at * size, row + (size_t)k * size, size);
    }
  }
}

// Writes the integers of one block of column c.
void place_integers(PackedMatrix& m, uint8_t* out, const Decoded& d, int first_k, int len, int c) {
  if (m.form == Form::kQ8x4) {
    constexpr int kPlace[8] = {0, 2, 4 * 16, 4 * 16 + 2, 1, 3, 4 * 16 + 1, 4 * 16 + 3};  // of k = 0 ... 7 for column 0
    for (int i = 0; i < len; ++i) {
      const int k = first_k + i;
      out[(size_t)(k / 8) * 128 + (size_t)c * 4 + kPlace[k % 8]] = (uint8_t)(d.q[i] + m.zero);
    }
    return;
  }
  if (m.form == Form::kQ8) {
    int8_t* q = (int8_t*)out;
    for (int i = 0; i < len; ++i) {
      const int k = first_k + i;
      q[((size_t)(k / 2) * 16 + c) * 2 + k % 2] = d.q[i];
    }
    return;
  }
  uint16_t* words = (uint16_t*)out;
  for (int i = 0; i < len; i += 8) {
    for (int h = 0; h < 2; ++h) {
      unsigned word = 0;
      for (int j = 0; j < 4; ++j) word |= (unsigned)(d.q[i + 2 * j + h] + m.zero) << (4 * j);
      words[((size_t)((first_k + i) / 8) * 16 + c) * 2 + h] = (uint16_t)word;
    }
  }
}

// Kernels add to the exponent of scales: makes 1 x 0 of 0 x q, and returns whether all scales are finite numbers.
bool settle_scales(const FormatInfo& info, Decoded& d) {
  bool finite = true;
  for (int g = 0; g < info.block_len / info.group; ++g) {
    finite &= info.half_scales ? (d.scale16 & 0x7c00u) != 0x7c00u : std::isfinite(d.scale[g]);
    if (info.half_scales ? (d.scale16 & 0x7fffu) != 0 : d.scale[g] != 0.0f) continue;
    memset(d.q + g * info.group, 0, (size_t)info.group);
    d.scale16 = 0x3c00;
    d.scale[g] = 1.0f;
  }
  return finite;
}

bool pack_quantised(PackedMatrix& m, const FormatInfo& info, const uint8_t* source, int p) {
  uint8_t* out = m.data.get() + (size_t)p * m.panel_bytes;
  uint8_t* scales = out + m.value_bytes;
  uint8_t* mins = m.has_min ? scales + m.scale_bytes() : nullptr;
  const int blocks = m.k / info.block_len, per_block = info.block_len / info.group;
  bool finite = true;
  Decoded d;
  for (int c = 0; c < 16; ++c) {
    const int column = p * 16 + c;
    const uint8_t* row = source + (size_t)column * blocks * info.block_bytes;
    for (int b = 0; b < blocks; ++b) {
      if (column < m.n) {
        decode_block(info.format, row + (size_t)b * info.block_bytes, d);
      } else {
        memset(&d, 0, sizeof d);  // columns beyond n: zero weights
      }
      finite &= settle_scales(info, d);
      place_integers(m, out, d, b * info.block_len, info.block_len, c);
      for (int g = 0; g < per_block; ++g) {
        const size_t at = (size_t)(b * per_block + g) * 16 + c;
        if (m.half_scales) {
          ((uint16_t*)scales)[at] = d.scale16;
          if (mins) ((uint16_t*)mins)[at] = d.min16;
        } else {
          ((float*)scales)[at] = d.scale[g];
          if (mins) ((float*)mins)[at] = d.min[g];
        }
      }
    }
  }
  return finite;
}

}  // namespace

void free_bytes(void* p) { free(p); }

Bytes allocate_bytes(size_t bytes) {
  // Rounded up with a spare line: vector kernels may load a whole line at the end. Large pieces are aligned to huge
  // pages, since kernels walk rows that lie pages apart and would otherwise miss the TLB on each.
  constexpr size_t kHugePage = 2 << 20;
  const size_t alignment = bytes >= kHugePage ? kHugePage : 64;
  const size_t size = (bytes + 64 + alignment - 1) / alignment * alignment;
  void* p = aligned_alloc(alignment, size);
  if (p == nullptr) throw std::bad_alloc();
  if (alignment == kHugePage) madvise(p, size, MADV_HUGEPAGE);
  return {(uint8_t*)p, free_bytes};
}

const FormatInfo* find_format(const std::string& name) {
  for (const FormatInfo& f : kFormats)
    if (name == f.name) return &f;
  return nullptr;
}

Bytes Arena::take(size_t bytes) {
  constexpr size_t kChunk = 16 << 20;
  const size_t size = (bytes + 127) / 64 * 64;  // a spare line, as in allocate_bytes
  if (size > left_) {
    chunks_.push_back(allocate_bytes(std::max(size, kChunk)));
    next_ = chunks_.back().get();
    left_ = std::max(size, kChunk);
  }
  uint8_t* p = next_;
  next_ += size;
  left_ -= size;
  return {p, [](void*) {}};
}

PackedMatrix make_packed(const FormatInfo& info, int n, int k, EightBits eight_bits, Arena& arena) {
  PackedMatrix m;
  m.n = n;
  m.k = k;
  m.panels = (n + 15) / 16;
  const int padded = padded32(k);
  if (info.group == 0) {
    m.form = info.format == Format::F32 ? Form::kF32 : info.format == Format::F16 ? Form::kF16 : Form::kBF16;
    m.value_bytes = m.form == Form::kF32 ? (size_t)k * 64 : (size_t)padded * 32;
    m.groups = 0;
  } else {
    m.form = info.nibbles ? Form::kQ4 : eight_bits == EightBits::kQuads ? Form::kQ8x4 : Form::kQ8;
    m.zero = info.format == Format::Q4_0 ? 8 : m.form == Form::kQ8x4 ? 128 : 0;
    m.group = info.group;
    m.groups = k / info.group;
    m.has_min = info.has_min;
    m.half_scales = info.half_scales;
    m.value_bytes = (size_t)k * (info.nibbles ? 8 : 16);
  }
  m.panel_bytes = (m.value_bytes + m.scale_bytes() * (m.has_min ? 2 : 1) + 63) / 64 * 64;
  m.data = arena.take((size_t)m.panels * m.panel_bytes);
  return m;
}

bool pack_panel(PackedMatrix& m, const FormatInfo& info, const uint8_t* source, int p) {
  if (info.group != 0) return pack_quantised(m, info, source, p);
  pack_plain(m, info, source, p);
  return true;
}

void unpack_row(const FormatInfo& info, const uint8_t* row, int k, float* out) {
  if (info.format == Format::F32) {
    memcpy(out, row, (size_t)k * 4);
  } else if (info.group == 0) {
    for (int i = 0; i < k; ++i) {
      const uint16_t raw = load16(row + 2 * (size_t)i);
      if (info.format == Format::F16) {
        out[i] = half_value(raw);
      } else {
        const uint32_t bits = (uint32_t)raw << 16;
        memcpy(&out[i], &bits, 4);
      }
    }
  } else {
    Decoded d;
    for (int b = 0; b < k / info.block_len; ++b) {
      decode_block(info.format, row + (size_t)b * info.block_bytes, d);
      for (int i = 0; i < info.block_len; ++i) {
        const int g = i / info.group;
        const float scale = info.half_scales ? half_value(d.scale16) : d.scale[g];
        const float min = !info.has_min ? 0.0f : info.half_scales ? half_value(d.min16) : d.min[g];
        const float product = scale * (float)d.q[i];
        out[(size_t)b * info.block_len + i] = info.has_min ? product + min : product;
      }
    }
  }
}

}  // namespace octavo
