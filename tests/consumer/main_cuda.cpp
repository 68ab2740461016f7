// SPDX-License-Identifier: Apache-2.0
#include <kvkeep/cuda.h>
#include <kvkeep/cuda/compact.h>
#include <kvkeep/kvkeep.h>

int main() {                                  // 0 when the launchers are there, and a GPU is found or its absence said
  kvkeep::cuda::launch_compact({}, nullptr);  // of no rows
  try {
    static_cast<void>(kvkeep::cuda::accelerator(0));
  } catch (const kvkeep::DeviceError& error) {
    return std::string(error.what()).find("GPU 0 is not there") == std::string::npos ? 1 : 0;
  }
  return 0;
}
