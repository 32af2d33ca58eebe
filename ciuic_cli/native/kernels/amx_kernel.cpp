// The product of packed codes with many rows of activations on AMX, the matrix unit of Intel processors.
//
// The unit multiplies tile registers of 16 rows of 64 bytes: sums (16 x 16) += activations x weights. Activations are laid
// out for it (activations.h): a register holds 16 of their rows. Weights are decoded into registers of a row group:
//
// - Integers: row k of a register holds the four hash bytes of column k for the group's 16 rows, which is how column k is
//   decoded. Each activation is there four times, so one instruction sums the hash bytes and multiplies them. The sums are
//   those of multiply_bytes in matmul_kernel.cpp.
// - bfloat16: row k holds the levels of columns 2 k and 2 k + 1. Levels beyond 256 are rounded to 8 significant bits. It
//   takes more instructions per weight and half as many products, so it serves more rows.
//
// A block of 16 registers per row group is decoded once for all rows of activations, into memory that stays in the
// first-level cache. Two row groups are multiplied at a time, so that each register of activations is loaded once for
// both. The next registers are decoded between the products: decoding occupies the vector units, products do not.
#include <cpuid.h>
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>

#include "activations.h"
#include "kernels_of_isa.h"
#include "tile.h"
#include "tile_shapes.h"

namespace ciuic {
namespace CIUIC_ISA {
namespace {

constexpr long kRegisterBytes = kTile * kRegisterRowBytes;

// Fewer rows of activations are multiplied faster without the unit. Measured: docs/experiments/runtime/matrix-units.md.
constexpr long kFewestRows = 4;

// Writes the hashes of a tile of codes, column by column: 1 KB.
template <int H, bool Masked, int C = 0>
inline __attribute__((always_inline)) void write_columns(const Tile<H>& tile, __m512i mask, uint8_t* to) {
  if constexpr (C < kTile) {
    _mm512_store_si512(to + kRegisterRowBytes * C, hash_of_column(tile.template column<C, Masked>(mask)));
    write_columns<H, Masked, C + 1>(tile, mask, to);
  }
}

// The levels of a column in float32.
template <int H, bool Masked, int C>
inline __attribute__((always_inline)) __m512 levels(const Tile<H>& tile, __m512i mask) {
  const __m512i hash = _mm512_mullo_epi32(tile.template column<C, Masked>(mask),
                                          _mm512_set1_epi32(static_cast<int>(CIUIC_MULTIPLIER)));
  return _mm512_cvtepi32_ps(_mm512_dpbusd_epi32(_mm512_set1_epi32(-CIUIC_LEVEL_CENTRE), hash, _mm512_set1_epi8(1)));
}

// Writes the levels of a tile of codes in bfloat16, pair by pair of columns: 512 bytes.
template <int H, bool Masked, int P = 0>
inline __attribute__((always_inline)) void write_pairs(const Tile<H>& tile, __m512i mask, uint8_t* to) {
  if constexpr (P < kTile / 2) {
    // Words 0 to 15 hold column 2 P, words 16 to 31 column 2 P + 1.
    const __m512i columns = reinterpret_cast<__m512i>(
        _mm512_cvtne2ps_pbh(levels<H, Masked, 2 * P + 1>(tile, mask), levels<H, Masked, 2 * P>(tile, mask)));
    const __m512i even = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    const __m512i order = _mm512_or_si512(even, _mm512_add_epi32(_mm512_slli_epi32(even, 16), _mm512_set1_epi32(16 << 16)));
    _mm512_store_si512(to + kRegisterRowBytes * P, _mm512_permutexvar_epi16(order, columns));
    write_pairs<H, Masked, P + 1>(tile, mask, to);
  }
}

template <int H, bool Masked, bool Bfloat16>
void write_tile(const uint8_t* codes, int L, uint8_t* to) {
  const Tile<H> tile(codes);
  const __m512i mask = Tile<H>::mask_of(L);
  if constexpr (Bfloat16)
    write_pairs<H, Masked>(tile, mask, to);
  else
    write_columns<H, Masked>(tile, mask, to);
}

using WriteTile = void (*)(const uint8_t* codes, int L, uint8_t* to);

template <bool Bfloat16>
WriteTile writer_for(int half_bits, int L) {
  WriteTile chosen = nullptr;
  with_half_bits(half_bits, [&](auto constant) {
    constexpr int H = decltype(constant)::value;
    chosen = L == 16 ? write_tile<H, false, Bfloat16> : write_tile<H, true, Bfloat16>;
  });
  return chosen;
}

// A block of a row group: its codes, `tiles` tiles of 16 columns, and the memory of its registers.
struct Source {
  const uint8_t* codes;
  long tiles, tile_bytes;
  int L;
  WriteTile write;
  uint8_t* registers;

  template <bool Bfloat16>
  void decode(long number) const {
    uint8_t* to = registers + kRegisterBytes * number;
    if constexpr (!Bfloat16) {
      write(codes + tile_bytes * number, L, to);
    } else {
      write(codes + tile_bytes * 2 * number, L, to);
      if (2 * number + 1 < tiles)
        write(codes + tile_bytes * (2 * number + 1), L, to + kRegisterBytes / 2);
      else
        std::memset(to + kRegisterBytes / 2, 0, kRegisterBytes / 2);
    }
  }
};

// Sums of a block, int32 or float32: sums[2 a + g] of activations a and row group g.
union Sums16 {
  int32_t integer[kTile * kTile];
  float real[kTile * kTile];
};

// Multiplies `count` registers of one or two bands of activations, a0 and a1 (null: none; registers are `stride` bytes
// apart), by those of `Groups` row groups. Decode: the latter are not in memory yet.
//
// Register 2 a + g holds sums, register 4 + a activations and register 6 + g weights. The intrinsics take literals.
template <bool Bfloat16, int Bands, int Groups, bool Decode>
void multiply_block(const uint8_t* a0, const uint8_t* a1, long stride, const Source* source, long count, Sums16* sums) {
#define CIUIC_DOT(to, a, b)     \
  {                             \
    if constexpr (Bfloat16)     \
      _tile_dpbf16ps(to, a, b); \
    else                        \
      _tile_dpbsud(to, a, b);   \
  }
  _tile_zero(0);
  if (Groups > 1) _tile_zero(1);
  if (Bands > 1) _tile_zero(2);
  if (Bands > 1 && Groups > 1) _tile_zero(3);
  if (Decode)
    for (int g = 0; g < Groups; ++g) source[g].decode<Bfloat16>(0);
  for (long t = 0; t < count; ++t) {
    if (Decode && t + 1 < count)
      for (int g = 0; g < Groups; ++g) source[g].decode<Bfloat16>(t + 1);
    _tile_loadd(6, source[0].registers + t * kRegisterBytes, kRegisterRowBytes);
    _tile_loadd(4, a0 + t * stride, kRegisterRowBytes);
    CIUIC_DOT(0, 4, 6)
    if constexpr (Groups > 1) {
      _tile_loadd(7, source[1].registers + t * kRegisterBytes, kRegisterRowBytes);
      CIUIC_DOT(1, 4, 7)
    }
    if constexpr (Bands > 1) {
      _tile_loadd(5, a1 + t * stride, kRegisterRowBytes);
      CIUIC_DOT(2, 5, 6)
    }
    if constexpr (Bands > 1 && Groups > 1) CIUIC_DOT(3, 5, 7)
  }
  _tile_stored(0, sums + 0, kRegisterRowBytes);
  if (Groups > 1) _tile_stored(1, sums + 1, kRegisterRowBytes);
  if (Bands > 1) _tile_stored(2, sums + 2, kRegisterRowBytes);
  if (Bands > 1 && Groups > 1) _tile_stored(3, sums + 3, kRegisterRowBytes);
#undef CIUIC_DOT
}

using MultiplyBlock = void (*)(const uint8_t*, const uint8_t*, long, const Source*, long, Sums16*);

template <bool Bfloat16>
MultiplyBlock multiplier_for(int bands, int groups, bool decode) {
  static constexpr MultiplyBlock choices[2][2][2] = {
      {{multiply_block<Bfloat16, 1, 1, false>, multiply_block<Bfloat16, 1, 1, true>},
       {multiply_block<Bfloat16, 1, 2, false>, multiply_block<Bfloat16, 1, 2, true>}},
      {{multiply_block<Bfloat16, 2, 1, false>, multiply_block<Bfloat16, 2, 1, true>},
       {multiply_block<Bfloat16, 2, 2, false>, multiply_block<Bfloat16, 2, 2, true>}}};
  return choices[bands - 1][groups - 1][decode];
}

// Adds the sums of a band, or at 15 bits of its low and its high bytes, to `count` rows of y. The first one is row first_row
// of the activations.
template <Precision P>
void add_block(const Sums16& low, const Sums16& high, const Activations& x, long block, long first_row, long count, float* y) {
  for (long i = 0; i < count; ++i) {
    if constexpr (P == kBfloat16) {
      _mm512_storeu_ps(y + kTile * i, _mm512_add_ps(_mm512_loadu_ps(y + kTile * i), _mm512_load_ps(low.real + kTile * i)));
    } else {
      const QuantizedRow row = quantized_row(x, first_row + i);
      Sums sum = {_mm512_add_epi32(_mm512_set1_epi32(row.offset(block)), _mm512_load_si512(low.integer + kTile * i))};
      if (P == kInt15) sum = combined(sum, {_mm512_load_si512(high.integer + kTile * i)}, 8);
      add_scaled(y + kTile * i, sum, row.scale(block));
    }
  }
}

// One or two row groups of a block with rows first_row .. first_row + batch - 1 of the activations.
template <Precision P>
void multiply_rows(const Source* source, int groups, const Activations& x, long block, long first_row, long batch,
                   float* const* y) {
  alignas(64) Sums16 sums[4];
  const long stride = register_stride(x), count = registers_of_block(x.layout, block);
  // At 15 bits, both bytes of one band are multiplied at a time; otherwise two bands.
  constexpr int kBands = P == kInt15 ? 1 : 2;
  for (long done = 0; done < batch; done += kBands * kBandRows) {
    const long rest = batch - done, first = first_row + done;
    const bool second = kBands == 2 && rest > kBandRows;
    const uint8_t* a1 = nullptr;
    if (P == kInt15) a1 = register_row(x, block, first, 1);
    if (second) a1 = register_row(x, block, first + kBandRows, 0);
    multiplier_for<P == kBfloat16>(a1 == nullptr ? 1 : 2, groups, done == 0)(register_row(x, block, first, 0), a1, stride, source,
                                                                           count, sums);
    for (int g = 0; g < groups; ++g) {
      float* to = y[g] + kTile * done;
      add_block<P>(sums[g], sums[2 + g], x, block, first, rest < kBandRows ? rest : kBandRows, to);
      if (second)
        add_block<P>(sums[2 + g], sums[2 + g], x, block, first + kBandRows,
                     rest < 2 * kBandRows ? rest - kBandRows : kBandRows, to + kTile * kBandRows);
    }
  }
}

template <Precision P>
void multiply(const RowGroup* groups, int count, int L, const Activations& x, long first_row, long batch) {
  alignas(64) uint8_t registers[2][kRegistersPerBlock * kRegisterBytes];
  constexpr long kCodeTiles = kRegistersPerBlock * register_columns(P) / kTile;  // of a block
  const long tiles = x.layout.cols / kTile;
  for (int g = 0; g < count; ++g) std::memset(groups[g].sums, 0, sizeof(float) * kTile * batch);
  const TileShapes shapes(x.layout.band_rows);
  for (long block = 0; block * kCodeTiles < tiles; ++block)
    for (int g = 0; g < count; g += 2) {
      const int together = count - g < 2 ? 1 : 2;
      Source source[2];
      float* y[2];
      for (int i = 0; i < together; ++i) {
        const RowGroup& group = groups[g + i];
        const long tile_bytes = CIUIC_TILE_BYTES(group.half_bits), first = block * kCodeTiles;
        source[i] = {group.codes + first * tile_bytes, tiles - first, tile_bytes, L,
                     writer_for<P == kBfloat16>(group.half_bits, L), registers[i]};
        y[i] = group.sums;
      }
      multiply_rows<P>(source, together, x, block, first_row, batch, y);
    }
}

void multiply_groups(const RowGroup* groups, int count, int L, const Activations& x, long first_row, long batch) {
  if (x.layout.precision == kBfloat16) return multiply<kBfloat16>(groups, count, L, x, first_row, batch);
  if (batch < kFewestRows || x.layout.planes == 0) return avx512vnni::table.matmul_groups(groups, count, L, x, first_row, batch);
  if (x.layout.precision == kInt15) return multiply<kInt15>(groups, count, L, x, first_row, batch);
  multiply<kInt8>(groups, count, L, x, first_row, batch);
}

void write_row(const float* x, const Activations& activations, long row) {
  const ActivationLayout& layout = activations.layout;
  if (layout.precision != kBfloat16) return avx512vnni::table.quantize_row(x, activations, row);
  constexpr long kColumns = register_columns(kBfloat16);
  for (long number = 0; number < layout.registers; ++number) {
    const float* from = x + kColumns * number;
    const __m512 first = _mm512_loadu_ps(from);
    const __m512 second = kColumns * number + kTile < layout.cols ? _mm512_loadu_ps(from + kTile) : _mm512_setzero_ps();
    uint8_t* block = register_row(activations, number / kRegistersPerBlock, row, 0);
    uint8_t* to = block + number % kRegistersPerBlock * register_stride(activations);
    _mm512_store_si512(to, reinterpret_cast<__m512i>(_mm512_cvtne2ps_pbh(second, first)));
  }
}

// True if the processor has the unit and the operating system lets this process use it.
bool usable() {
  constexpr unsigned kBfloat16Products = 1u << 22, kTiles = 1u << 24, kInt8Products = 1u << 25;  // EDX of leaf 7
  constexpr unsigned kBfloat16Conversions = 1u << 5;                                             // EAX of leaf 7, 1
  constexpr unsigned kNeeded = kBfloat16Products | kTiles | kInt8Products;
  unsigned a, b, c, d;
  if (!__get_cpuid_count(7, 0, &a, &b, &c, &d) || (d & kNeeded) != kNeeded) return false;
  if (!__get_cpuid_count(7, 1, &a, &b, &c, &d) || (a & kBfloat16Conversions) == 0) return false;
  constexpr long kRequestPermission = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA: asm/prctl.h
  return syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

Kernels with_amx() {
  Kernels result = avx512vnni::table;
  result.name = "amx";
  result.matmul_groups = multiply_groups;
  result.groups_together = kMaxGroupsTogether;
  result.batch_together = 256;
  result.bfloat16 = true;
  result.byte_rows = kMaxBatchTogether;
  result.quantize_row = write_row;
  return result;
}

}  // namespace

const Kernels* table_if_usable() {
  if (!usable()) return nullptr;
  static const Kernels table = with_amx();
  return &table;
}

}  // namespace CIUIC_ISA
}  // namespace ciuic
