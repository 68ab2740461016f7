// SPDX-License-Identifier: Apache-2.0
#include <benchmark/benchmark.h>

#include "kvkeep/torch.h"

int main(int argc, char** argv) {
  kvkeep::use_torch();
  const kvkeep::UsingThreads threads(kvkeep::torch_threads());
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
