// SPDX-License-Identifier: Apache-2.0
#include "device.h"

#include <CLI/Option.hpp>
#include <charconv>
#include <filesystem>

#include "kvkeep/core/error.h"
#ifdef KVKEEP_CLI_CUDA
#include "kvkeep/cuda.h"
#endif

namespace kvkeep::cli {
namespace {

// The number of the GPU that `name` means: "cuda" is "cuda:0".
int gpu_of(const std::string& name) {
  const std::string digits = name == "cuda" ? "0" : name.starts_with("cuda:") ? name.substr(5) : "";
  std::int32_t index = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), index);
  KVKEEP_REQUIRE(error == std::errc() && end == digits.data() + digits.size() && index >= 0,
                 "--device: there is no such device; given '", name, "'; allowed cpu, cuda, cuda:INDEX");
  return index;
}

}  // namespace

bool has_nvidia_driver() {
  return std::filesystem::exists("/dev/nvidiactl") || std::filesystem::exists("/proc/driver/nvidia/version");
}

void DeviceOptions::add(CLI::App& app) {
  app.add_option("--device", name, "device that holds the model and its cache: the CPU, or a GPU by its number")
      ->option_text("cpu|cuda:N [cpu]");
}

std::shared_ptr<Machine> DeviceOptions::accelerator() const {
  if (name == "cpu") return nullptr;
  const int gpu = gpu_of(name);
#ifdef KVKEEP_CLI_CUDA
  try {
    return cuda::accelerator(gpu);
  } catch (const std::exception&) {
    KVKEEP_REQUIRE_AS(DeviceError, has_nvidia_driver(), "--device: there is no NVIDIA driver here; given cuda:", gpu,
                      "; allowed cpu");
    throw;
  }
#else
  refuse<Unsupported>(
      "--device: this kvkeep was built without CUDA (nvcc was not found, or KVKEEP_CUDA=OFF); given cuda:", gpu,
      "; allowed cpu");
#endif
}

}  // namespace kvkeep::cli
