// SPDX-License-Identifier: Apache-2.0
// Whatever the bytes: statistics, or a sentence. The zip layer wants right checksums, which no fuzzer guesses, so an
// input is also put into an archive as its pickle.

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstdlib>
#include <string>
#include <string_view>

#include "kvkeep/core/error.h"
#include "kvlab/published_calibration.h"

namespace {

std::string little(std::uint64_t value, int bytes) {
  std::string out;
  for (int i = 0; i < bytes; ++i) out.push_back(static_cast<char>(value >> (8 * i) & 0xff));
  return out;
}

std::uint32_t checksum(std::string_view bytes) {
  std::uint32_t c = 0xffffffffU;
  for (const char byte : bytes) {
    c ^= static_cast<unsigned char>(byte);
    for (int bit = 0; bit < 8; ++bit) c = (c & 1U) != 0 ? 0xedb88320U ^ (c >> 1U) : c >> 1U;
  }
  return c ^ 0xffffffffU;
}

std::string archive_of(std::string_view pickle) {
  std::string out, directory;
  const std::string storage(64, '\0');
  for (const auto& [name, data] :
       {std::pair<std::string, std::string_view>{"a/data.pkl", pickle}, {"a/data/0", storage}}) {
    const std::string about = little(0, 2) + little(0, 4) + little(checksum(data), 4) + little(data.size(), 4) +
                              little(data.size(), 4) + little(name.size(), 2);
    directory += little(0x02014b50, 4) + little(20, 2) + little(20, 2) + little(0, 2) + about + std::string(12, '\0') +
                 little(out.size(), 4) + name;
    out += little(0x04034b50, 4) + little(20, 2) + little(0, 2) + about + little(0, 2) + name;
    out += data;
  }
  const std::size_t begin = out.size();
  return out + directory + little(0x06054b50, 4) + little(0, 4) + little(2, 2) + little(2, 2) +
         little(directory.size(), 4) + little(begin, 4) + little(0, 2);
}

void read(std::string_view bytes) {
  try {
    const kvkeep::Calibration c = kvkeep::read_calibration(bytes, "bytes");
    for (const auto& [place, head] : c.heads)
      if (head.q_mean.size() != static_cast<std::size_t>(c.pairs()) || head.q_abs_mean.size() != head.q_mean.size())
        std::abort();
  } catch (const kvkeep::InvalidArgument&) {
  }
}

}  // namespace

extern "C" int LLVMFuzzerInitialize(int*, char***) {
  kvkeep::lm::use_published_calibrations();
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const std::string_view bytes(reinterpret_cast<const char*>(data), size);
  read(bytes);
  read(archive_of(bytes));
  return 0;
}
