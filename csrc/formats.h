// Weight formats: from the bytes of a checkpoint to the few packed forms that kernels read in order.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

namespace octavo {

// n rounded up: to whole vectors of 16, and to what matrices, prepared rows and keys in pairs are padded to.
inline int padded16(int n) { return (n + 15) / 16 * 16; }
inline int padded32(int n) { return (n + 31) / 32 * 32; }

// Formats of checkpoints; numbers are GGUF type ids.
enum class Format : int32_t {
  F32 = 0,
  F16 = 1,
  Q4_0 = 2,
  Q4_1 = 3,
  Q5_0 = 6,
  Q5_1 = 7,
  Q8_0 = 8,
  Q2_K = 10,
  Q3_K = 11,
  Q4_K = 12,
  Q5_K = 13,
  Q6_K = 14,
  BF16 = 30,
};

struct FormatInfo {
  const char* name;
  Format format;
  int block_len;     // weights in a block
  int block_bytes;   // bytes of a block
  int group;         // consecutive weights that share one scale (quantised formats), else 0
  bool has_min;      // w = scale * q + min, else w = scale * q
  bool half_scales;  // scale (and min) are half floats in the file and stay so in the packed form
  bool nibbles;      // q fits in 4 bits
};

// Null where the name is unknown.
const FormatInfo* find_format(const std::string& name);

// Memory for kernels: aligned, with room to load a whole vector at the end.
using Bytes = std::unique_ptr<uint8_t[], void (*)(void*)>;
void free_bytes(void* p);
Bytes allocate_bytes(size_t bytes);

// Memory of many matrices, laid end to end in chunks of huge pages: a step that streams all weights crosses few pages,
// and what comes next lies ahead of the prefetching. It outlives what was taken from it.
class Arena {
 public:
  Bytes take(size_t bytes);

 private:
  std::vector<Bytes> chunks_;
  uint8_t* next_ = nullptr;
  size_t left_ = 0;
};

// Packed forms. A panel holds 16 output columns (rows of the checkpoint's matrix); along K it is
//   kF32   float  [K][16]
//   kF16   half   [K32/2][16][2]        K32 = K rounded up to 32, padded with zeros
//   kBF16  bf16   [K32/2][16][2]
//   kQ8    int8   [K/2][16][2]          + scales [groups][16], mins [groups][16]
//   kQ8x4  uint8  [K/8][2][16][4]       q + 128; the first half holds k = 8c + 0, 4, 1, 5, the second 2, 6, 3, 7: the
//                                       order in which masked words of kQ4 hold their bytes
//   kQ4    uint16 [K/8][16][2]          nibble j of word [c][n][h] is weight k = 8c + 2j + h of column n
// so that one 64-byte load of a paired form is the right operand of a bf16 dot product over two k, and one of kQ8x4
// that of an 8-bit dot product over four.
enum class Form : int32_t { kF32, kF16, kBF16, kQ8, kQ8x4, kQ4 };

enum class EightBits : int32_t { kPairs, kQuads };  // kQ8 or kQ8x4

struct PackedMatrix {
  Form form;
  int n = 0;       // output columns
  int k = 0;       // reduction length
  int panels = 0;  // ceil(n / 16)
  int group = 32;  // weights per scale
  int groups = 0;  // per column
  int zero = 0;    // kQ4, kQ8x4: the packed integer 0 means -zero
  bool has_min = false;
  bool half_scales = false;
  bool finite_scales = true;  // else kernels that add to a scale's exponent must not
  // A panel: its values, then its scales and its mins ([groups][16] half or float), so that memory is read in order.
  size_t value_bytes = 0;
  size_t panel_bytes = 0;
  Bytes data{nullptr, free_bytes};

  const uint8_t* panel(int p) const { return data.get() + (size_t)p * panel_bytes; }
  size_t scale_bytes() const { return (size_t)groups * 16 * (half_scales ? 2 : 4); }
  const uint8_t* panel_scales(int p) const { return panel(p) + value_bytes; }
  const uint8_t* panel_mins(int p) const { return has_min ? panel_scales(p) + scale_bytes() : nullptr; }
  size_t bytes() const { return (size_t)panels * panel_bytes; }
};

// Takes memory for the packed form of an n x k matrix; fill it with pack_panel.
PackedMatrix make_packed(const FormatInfo& info, int n, int k, EightBits eight_bits, Arena& arena);

// Packs columns [16p, 16p + 16) from `source`, the rows of the checkpoint's matrix laid end to end. Returns
// whether all their scales are finite numbers.
bool pack_panel(PackedMatrix& m, const FormatInfo& info, const uint8_t* source, int p);

// Unpacks one row of `k` weights to floats, exactly as octavo.weights.formats.unpack does.
void unpack_row(const FormatInfo& info, const uint8_t* row, int k, float* out);

}  // namespace octavo
