#pragma once
/// `KVKEEP_HD` marks a function whose one body serves the CPU and CUDA, so that both decide alike bit for bit.

#if defined(__CUDACC__)
#define KVKEEP_HD __host__ __device__
#else
#define KVKEEP_HD
#endif
