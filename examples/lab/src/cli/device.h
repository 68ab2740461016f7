// SPDX-License-Identifier: Apache-2.0
#pragma once
// --device: where the model and its cache are.

#include <CLI/App.hpp>
#include <memory>
#include <string>

#include "kvkeep/policy/machine.h"

namespace kvkeep::cli {

// Whether this machine has an NVIDIA driver.
bool has_nvidia_driver();

struct DeviceOptions {
  std::string name = "cpu";
  void add(CLI::App& app);

  // A new one each time, since every generator needs its own; null: the CPU. Throws: InvalidArgument for an unknown
  // name; Unsupported for CUDA in a build without it; DeviceError for a GPU that does not exist.
  [[nodiscard]] std::shared_ptr<Machine> accelerator() const;
};

}  // namespace kvkeep::cli
