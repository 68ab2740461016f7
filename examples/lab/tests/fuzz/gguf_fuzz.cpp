// SPDX-License-Identifier: Apache-2.0
// Whatever the bytes: the reader gives numbers and strings that lie inside them, and a config that holds together and
// a tokenizer whose ids are its own, or refuses with a sentence.

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string_view>

#include "kvkeep/core/error.h"
#include "kvkeep/io/gguf.h"
#include "kvkeep/io/model_config.h"
#include "kvlab/text_model.h"

namespace {

using namespace kvkeep;

// What is refused must be refused with a sentence of the readers.
void attempt(auto&& call) {
  constexpr std::array<std::string_view, 6> kReaders = {
      "read GGUF: ", "read tokenizer: ", "read config: ", "model config: ", "ModelSpec: ", "RoPE: "};
  try {
    call();
  } catch (const Error& refused) {
    const std::string_view said = refused.what();
    const auto says = [&](std::string_view reader) { return said.starts_with(reader); };
    if (std::ranges::none_of(kReaders, says)) std::abort();
  }
}

void read_config(const io::GgufFile& file) {
  const io::ModelConfig config = io::ModelConfig::read(file);
  config.check();
  const ModelSpec& spec = config.spec;
  if (config.num_layers() < 1 || spec.query_heads % spec.kv_heads != 0) std::abort();
  if (spec.rope.inv_freq.size() != static_cast<std::size_t>(spec.key_dim) / 2) std::abort();
  if (!std::ranges::all_of(spec.rope.inv_freq, [](double frequency) { return std::isfinite(frequency); })) std::abort();
}

void read_text(const io::GgufFile& file) {
  const lm::Tokenizer tokenizer = lm::read_tokenizer(file);
  for (const std::int32_t id : tokenizer.encode("the <s> \xe2\x96\x81h\xc3\xa9 1234\n"))
    if (id < 0 || id >= tokenizer.vocab_size()) std::abort();
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  attempt([&] {
    const auto file = io::GgufFile::from_bytes({reinterpret_cast<const char*>(data), size});
    attempt([&] { read_config(file); });
    attempt([&] { read_text(file); });
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
      for (const Dtype dtype : {Dtype::f32, Dtype::f16, Dtype::bf16}) {
        const Tensor tensor = file.tensor(name, dtype);
        if (tensor.sizes() != Shape(file.described(name).shape)) std::abort();
        const auto* bytes = reinterpret_cast<const std::uint8_t*>(tensor.bytes());
        for (std::int64_t i = 0; i < tensor.nbytes(); ++i) sum += bytes[i];
      }
    }
    [[maybe_unused]] static volatile std::uint64_t sink;
    sink = sum;
  });
  return 0;
}
