// SPDX-License-Identifier: Apache-2.0
#pragma once
/// `KVKEEP_HD` marks a function with one body for the CPU and CUDA, so that both decide the same, bit for bit. For the
/// same reason no multiplication of a body may be fused with an addition, whatever -march and -ffp-contract say: where
/// the two meet, bodies say `product`.

#include <cstdint>

// What every header of the interface includes: an older language is told once.
#if __cplusplus <= 201703L
#error "kvkeep needs C++20: compile with -std=c++20"
#include "kvkeep needs C++20"  // no such file, which ends the list of errors
#endif

#if defined(__CUDACC__)
#define KVKEEP_HD __host__ __device__
#else
#define KVKEEP_HD
#endif

// Before a loop: how often a GPU's compiler writes it out. Without, it may be four times or more, for few rounds.
#if defined(__CUDA_ARCH__)
#define KVKEEP_PRAGMA(x) _Pragma(#x)
#define KVKEEP_UNROLL(times) KVKEEP_PRAGMA(unroll times)
#else
#define KVKEEP_UNROLL(times)
#endif

// Hides from the compiler how the number or vector x came about. Our own sources, kernels included, are compiled so
// that nothing is fused, and need no such fence, behind which plain loops are not vectorised.
#if defined(KVKEEP_FP_CONTRACT_OFF) || defined(__CUDACC__)
#define KVKEEP_HIDE(x) static_cast<void>(0)
#elif defined(__SSE2__)
#define KVKEEP_HIDE(x) asm("" : "+v"(x))
#elif defined(__aarch64__)
#define KVKEEP_HIDE(x) asm("" : "+w"(x))
#else
#define KVKEEP_HIDE(x) asm("" : "+m"(x))
#endif

// What -ffast-math and -Ofast define, or one of the flags that they are made of.
#if (defined(__FINITE_MATH_ONLY__) && __FINITE_MATH_ONLY__ != 0) || defined(__FAST_MATH__) || \
    defined(__ASSOCIATIVE_MATH__) || defined(__RECIPROCAL_MATH__) || defined(__NO_SIGNED_ZEROS__)
#define KVKEEP_FAST_MATH                                                                        \
  "kvkeep: -ffast-math (or -Ofast, -ffinite-math-only, -fassociative-math, -freciprocal-math, " \
  "-fno-signed-zeros) changes what this code computes, NaN included; compile this source with -fno-fast-math"
#endif

namespace kvkeep {

#ifdef KVKEEP_FAST_MATH
[[gnu::error(KVKEEP_FAST_MATH)]] void fast_math();  // a call of it does not compile
#endif

/// a * b, rounded before anything is added to it.
template <class Real>
[[nodiscard]] KVKEEP_HD inline Real product(Real a, Real b) {
#ifdef KVKEEP_FAST_MATH
  fast_math();
#endif
  Real rounded = a * b;
  KVKEEP_HIDE(rounded);
  return rounded;
}

/// Threads that work on one row together. One body serves both the CPU, where a team is one thread, and CUDA, where it
/// is a block or a warp.
///
/// Every member calls the same functions in the same order with the same arguments except `mine`. Work over n elements
/// is split by `for (i = thread(); i < n; i += size())`. Members see each other's writes after sync(). Sums are over
/// integers, so they do not depend on the order of addition; sum_in_order() alone is not. count() and count_before()
/// are there for one thread and for a warp.
struct OneThread {
  /// Number of this member, 0 to size() - 1.
  [[nodiscard]] KVKEEP_HD constexpr std::int32_t thread() const { return 0; }
  [[nodiscard]] KVKEEP_HD constexpr std::int32_t size() const { return 1; }
  KVKEEP_HD void sync() const {}
  /// Sum over all members, the same for each.
  [[nodiscard]] KVKEEP_HD std::uint64_t sum(std::uint64_t mine) const { return mine; }
  /// The same of numbers that round, in an order that depends on size() alone.
  [[nodiscard]] KVKEEP_HD double sum_in_order(double mine) const { return mine; }
  /// Largest over all members; NaN is ignored.
  [[nodiscard]] KVKEEP_HD float largest(float mine) const { return mine; }
  /// Sum over the members before this one.
  [[nodiscard]] KVKEEP_HD std::uint64_t sum_before(std::uint64_t mine) const { return mine - mine; }
  /// How many members say yes.
  [[nodiscard]] KVKEEP_HD std::int32_t count(bool mine) const { return mine ? 1 : 0; }
  /// The same of the members before this one.
  [[nodiscard]] KVKEEP_HD std::int32_t count_before(bool) const { return 0; }
  /// The first member's number, for every member.
  template <class T>
  [[nodiscard]] KVKEEP_HD T from_first(T mine) const {
    return mine;
  }
};

}  // namespace kvkeep
