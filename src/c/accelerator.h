#pragma once
// What a C program holds of a GPU.

#include <memory>

#include "kvkeep/policy/machine.h"

struct kvkeep_accelerator {
  std::shared_ptr<kvkeep::Machine> machine;
};
