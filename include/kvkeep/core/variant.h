#pragma once
/// Which version of a method runs.

#include <cstdint>

namespace kvkeep {

/// `strict`: our corrected form, which keeps every guarantee. `official`: the published code, slot for slot, wherever
/// it terminates.
enum class Variant : std::uint8_t { strict, official };

}  // namespace kvkeep
