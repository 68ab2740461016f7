// SPDX-License-Identifier: Apache-2.0
// Whatever a trace says of its layers, positions and numbers: it is replayed, or refused with a sentence.

#include <cstddef>
#include <cstdint>
#include <string_view>

#include "kvkeep/policy/registry.h"
#include "kvkeep/trace/trace.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvkeep;
  static const auto policy = make_policy("ams-tova,budget=8,sink=1,recent=1,min_segment=1,max_segment=4");
  try {
    const auto file = io::SafetensorsFile::from_bytes({reinterpret_cast<const char*>(data), size});
    if (trace::kind_of(file) == "prefill")
      static_cast<void>(trace::replay_prefill(file, *policy));
    else
      static_cast<void>(trace::replay_event(file, *policy));
  } catch (const Error&) {
  }
  return 0;
}
