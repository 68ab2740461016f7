#pragma once
/// Which reading of a method runs.

#include <cstdint>

namespace kvkeep {

/// `strict`: our corrected form, every guarantee kept. `official`: the published code, slot for slot, where it
/// terminates.
enum class Variant : std::uint8_t { strict, official };

}  // namespace kvkeep
