#pragma once
/// `KVKEEP_HD` marks a function with one body for the CPU and CUDA, so that both decide the same, bit for bit. For the
/// same reason no multiplication of a body may be fused with an addition, whatever -march and -ffp-contract say: where
/// the two meet, bodies say `product`.

#if defined(__CUDACC__)
#define KVKEEP_HD __host__ __device__
#else
#define KVKEEP_HD
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

}  // namespace kvkeep
