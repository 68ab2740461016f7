#include "matrix_unit.h"

#include <atomic>

namespace kvkeep::cpu {
namespace {

std::atomic<const MatrixUnit*> used{nullptr};

}  // namespace

const MatrixUnit* matrix_unit() { return used.load(std::memory_order_acquire); }

void use_matrix_unit(const MatrixUnit* unit) { used.store(unit, std::memory_order_release); }

}  // namespace kvkeep::cpu
