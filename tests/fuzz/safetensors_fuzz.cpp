// SPDX-License-Identifier: Apache-2.0
// Whatever the bytes: the reader gives tensors that lie inside them, or refuses with a sentence.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kvkeep/core/error.h"
#include "kvkeep/io/safetensors.h"

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace kvkeep;
  try {
    const auto file = io::SafetensorsFile::from_bytes({reinterpret_cast<const char*>(data), size});
    std::uint64_t sum = 0;
    for (const std::string& name : file.names()) {
      const Tensor tensor = file.tensor(name);
      const auto* bytes = reinterpret_cast<const std::uint8_t*>(tensor.bytes());
      for (std::int64_t i = 0; i < tensor.nbytes(); ++i) sum += bytes[i];
    }
    [[maybe_unused]] static volatile std::uint64_t sink;
    sink = sum;
  } catch (const InvalidArgument& refused) {
    if (std::string_view(refused.what()).find("read safetensors: ") != 0) std::abort();
  }
  return 0;
}
