#include <benchmark/benchmark.h>

#include "kvkeep/torch.h"

int main(int argc, char** argv) {
  kvkeep::use_torch();
  benchmark::Initialize(&argc, argv);
  if (benchmark::ReportUnrecognizedArguments(argc, argv)) return 1;
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
