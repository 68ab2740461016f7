#pragma once
/// `KVKEEP_HD` marks a function whose one body serves the CPU and CUDA, so that both decide alike bit for bit. So do a
/// consumer's translation units: the target kvkeep::core compiles them with -ffp-contract=off, since no multiplication
/// may be fused with an addition. Who does not link it sets that flag.

#if defined(__FAST_MATH__)
#error \
    "kvkeep: -ffast-math (or -Ofast) changes what the headers compute, NaN included; compile what includes them without it"
#endif

#if defined(__CUDACC__)
#define KVKEEP_HD __host__ __device__
#else
#define KVKEEP_HD
#endif
