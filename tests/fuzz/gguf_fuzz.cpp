// Whatever the bytes: the reader gives numbers and strings that lie inside them, or refuses with a sentence.

#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kvkeep/core/error.h"
#include "kvkeep/io/gguf.h"

namespace {

using namespace kvkeep;

// What is refused must be refused with a sentence of the reader.
void attempt(auto&& call) {
  try {
    call();
  } catch (const InvalidArgument& refused) {
    if (std::string_view(refused.what()).find("read GGUF: ") != 0) std::abort();
  }
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  attempt([&] {
    const auto file = io::GgufFile::from_bytes({reinterpret_cast<const char*>(data), size});
    std::uint64_t sum = 0;
    for (const std::string_view key : file.keys()) {
      attempt([&] { sum += file.string(key).size(); });
      attempt([&] { sum += file.whole_number(key); });
      attempt([&] { sum += file.number(key) > 0; });
      attempt([&] { sum += file.truth(key); });
      attempt([&] { sum += file.whole_numbers(key).size() + file.numbers(key).size(); });
      attempt([&] {
        for (const std::string_view string : file.strings(key))
          for (const char c : string) sum += static_cast<unsigned char>(c);
      });
    }
    for (const std::string_view name : file.names()) {
      for (const ScalarType dtype : {kFloat32, kFloat16, kBFloat16}) {
        const Tensor tensor = file.tensor(name, dtype);
        if (tensor.sizes().vec() != file.described(name).shape) std::abort();
        const auto* bytes = static_cast<const std::uint8_t*>(tensor.const_data_ptr());
        for (std::size_t i = 0; i < tensor.nbytes(); ++i) sum += bytes[i];
      }
    }
    [[maybe_unused]] static volatile std::uint64_t sink;
    sink = sum;
  });
  return 0;
}
