#pragma once
/// `KVKEEP_HD` marks a function with one body for the CPU and CUDA, so that both decide the same, bit for bit. For the
/// same reason kvkeep::core compiles a consumer's translation units with -ffp-contract=off: no multiplication may be
/// fused with an addition. If you do not link that target, set the flag yourself.

#if defined(__FAST_MATH__)
#error "kvkeep: -ffast-math (or -Ofast) changes what the headers compute, NaN included; compile without it"
#endif

#if defined(__CUDACC__)
#define KVKEEP_HD __host__ __device__
#else
#define KVKEEP_HD
#endif
