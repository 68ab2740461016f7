#pragma once
// --device: where the model and its cache are.

#include <CLI/App.hpp>
#include <memory>
#include <string>

#include "kvkeep/core/tensor.h"
#include "kvkeep/policy/machine.h"

namespace kvkeep::cli {

struct DeviceOptions {
  std::string name = "cpu";
  void add(CLI::App& app);

  struct Place {
    Device device;
    std::shared_ptr<Machine> accelerator;  // null: the CPU
  };
  // Throws: InvalidArgument for an unknown name; Unsupported for CUDA in a build without it; DeviceError for a GPU
  // that does not exist.
  [[nodiscard]] Place find() const;
  // A new one for each generator; null: the CPU.
  [[nodiscard]] std::shared_ptr<Machine> accelerator() const { return find().accelerator; }
};

}  // namespace kvkeep::cli
