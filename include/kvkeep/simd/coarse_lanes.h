// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Not part of the interface. Products of keys in 8 bits, for machines that have an instruction for them. Long rows
/// need it: without, an R-KV event over 7,000 to 8,500 keys of a real model takes 1.3 to 1.45 times as long, and one
/// whose keys resemble nothing twice as long; up to 2,000 keys of a real model it makes no difference
/// (docs/inside/performance.md).

#include <cstdint>
#include <cstring>

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>
#endif

namespace kvkeep::cpu {

/// Keys in a coarse panel, and keys that are compared with it at a time.
inline constexpr std::int64_t kCoarseWidth = 32, kCoarseRows = 6;

/// Keys side by side: key j is about step[j] * q, q in [-127, 127].
struct CoarsePanel {
  std::int64_t words;      ///< 8-bit elements of a key / 4
  const std::uint32_t* q;  ///< [words, kCoarseWidth] four elements each
  const std::int32_t*
      start;           ///< [kCoarseWidth] -128 * sum of q: undoes the 128 that is added to the elements of the rows
  const float* step;   ///< [kCoarseWidth]
  const float* reach;  ///< [kCoarseWidth] 1 + length of the part of a unit key that the 8 bits lose
};

/// True if the machine multiplies and adds four 8-bit numbers per lane in one instruction (AVX-512 VNNI).
bool has_coarse_products();

/// False if no row i and panel key j have step_i * step_j * (q_i . q_j) + reach_i * reach_j above `bound`, except for
/// keys j whose bit is set in ignore[i]. rows[i]: q + 128, 4 * words bytes. Requires has_coarse_products(). Cost: a
/// quarter of the same products in fp32.
bool coarse_may_hit(const std::uint8_t* const* rows, const float* step, const float* reach, const std::uint32_t* ignore,
                    const CoarsePanel& panel, float bound);

// The compiler may use the instructions in these functions alone, whatever the rest is for.

#if defined(__x86_64__) && defined(__GNUC__)

inline bool has_coarse_products() {
  static const bool has = __builtin_cpu_supports("avx512f") != 0 && __builtin_cpu_supports("avx512bw") != 0 &&
                          __builtin_cpu_supports("avx512vnni") != 0;
  return has;
}

/// Four elements of a row, in every lane.
__attribute__((target("avx512f,avx512bw,avx512vnni"), always_inline)) inline __m512i four_of(const std::uint8_t* from) {
  int word = 0;
  std::memcpy(&word, from, sizeof word);
  return _mm512_set1_epi32(word);
}

__attribute__((target("avx512f,avx512bw,avx512vnni"))) inline bool coarse_may_hit(const std::uint8_t* const* rows,
                                                                                  const float* step, const float* reach,
                                                                                  const std::uint32_t* ignore,
                                                                                  const CoarsePanel& panel,
                                                                                  float bound) {
  const __m512i start0 = _mm512_loadu_si512(panel.start), start1 = _mm512_loadu_si512(panel.start + 16);
  __m512i a0 = start0, a1 = start1, b0 = start0, b1 = start1, c0 = start0, c1 = start1, e0 = start0, e1 = start1,
          f0 = start0, f1 = start1, g0 = start0, g1 = start1;
  const std::uint8_t *a = rows[0], *b = rows[1], *c = rows[2], *e = rows[3], *f = rows[4], *g = rows[5];
  const std::uint32_t* at = panel.q;
  for (std::int64_t w = 0; w < 4 * panel.words; w += 4, at += kCoarseWidth) {
    const __m512i left = _mm512_loadu_si512(at), right = _mm512_loadu_si512(at + 16);
    __m512i four = four_of(a + w);
    a0 = _mm512_dpbusd_epi32(a0, four, left);
    a1 = _mm512_dpbusd_epi32(a1, four, right);
    four = four_of(b + w);
    b0 = _mm512_dpbusd_epi32(b0, four, left);
    b1 = _mm512_dpbusd_epi32(b1, four, right);
    four = four_of(c + w);
    c0 = _mm512_dpbusd_epi32(c0, four, left);
    c1 = _mm512_dpbusd_epi32(c1, four, right);
    four = four_of(e + w);
    e0 = _mm512_dpbusd_epi32(e0, four, left);
    e1 = _mm512_dpbusd_epi32(e1, four, right);
    four = four_of(f + w);
    f0 = _mm512_dpbusd_epi32(f0, four, left);
    f1 = _mm512_dpbusd_epi32(f1, four, right);
    four = four_of(g + w);
    g0 = _mm512_dpbusd_epi32(g0, four, left);
    g1 = _mm512_dpbusd_epi32(g1, four, right);
  }
  const __m512i sums[kCoarseRows][2] = {{a0, a1}, {b0, b1}, {c0, c1}, {e0, e1}, {f0, f1}, {g0, g1}};
  const __m512 limit = _mm512_set1_ps(bound);
  unsigned may = 0;
  for (int half = 0; half < 2; ++half) {
    const __m512 steps = _mm512_loadu_ps(panel.step + 16 * half), reaches = _mm512_loadu_ps(panel.reach + 16 * half);
    for (int r = 0; r < kCoarseRows; ++r) {
      const __m512 cosine =
          _mm512_mul_ps(_mm512_maskz_cvtepi32_ps(0xFFFF, sums[r][half]), _mm512_mul_ps(steps, _mm512_set1_ps(step[r])));
      may |= _mm512_cmp_ps_mask(_mm512_fmadd_ps(reaches, _mm512_set1_ps(reach[r]), cosine), limit, _CMP_GT_OQ) &
             ~(ignore[r] >> 16 * half);
    }
  }
  return may != 0;
}

#else

inline bool has_coarse_products() { return false; }
inline bool coarse_may_hit(const std::uint8_t* const*, const float*, const float*, const std::uint32_t*,
                           const CoarsePanel&, float) {
  return true;
}

#endif

}  // namespace kvkeep::cpu
