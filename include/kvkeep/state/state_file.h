// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Files with the state of one sequence: safetensors files that also record what they belong to and a checksum over
/// everything.

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/core/compiled_only.h"
#include "kvkeep/core/tensor.h"
#include "kvkeep/io/safetensors.h"

namespace kvkeep {

/// Names and tensors, in file order.
using StateTensors = std::vector<std::pair<std::string, Tensor>>;

/// A 64-bit checksum. Bytes that differ only within one aligned 8-byte word never have the same; others do by chance,
/// about once in 2^64. The same in every process and build of one byte order. No protection against forgery. Cost: one
/// pass at about the speed of memory.
[[nodiscard]] std::uint64_t checksum(std::span<const std::byte> bytes);

/// One state: tensors, and what they belong to, by name.
struct SavedState {
  StateTensors tensors;
  std::map<std::string, std::string> about;
};

/// Writes a file for StateFile::open(), whole or not at all; replaces an existing file. Throws as io::write_safetensors
/// does. Cost: one checksum and one copy to the file, then fsync.
void write_state(const std::filesystem::path& file, const SavedState& state);
/// The bytes of that file, for StateFile::from_bytes().
[[nodiscard]] std::vector<std::byte> state_bytes(const SavedState& state);

/// One file, or its bytes, as a copy in memory that has not changed since it was written. This does not prove who wrote
/// it, so readers must check its contents.
class StateFile {
 public:
  /// Throws InvalidArgument, which names the file, if it cannot be read, is not the state of a sequence, has an unknown
  /// version, is truncated, or differs from what was written; DeviceError if there is not enough memory. Cost: one read
  /// and one checksum of the file, which stays in memory as long as this object or one of its tensors.
  [[nodiscard]] static StateFile open(const std::filesystem::path& file);
  /// The same for bytes of state_bytes(), which messages call "the saved state".
  [[nodiscard]] static StateFile from_bytes(std::span<const std::byte> bytes);

  [[nodiscard]] bool has(std::string_view name) const { return file_.has(name); }
  /// Read-only. `shape`: -1 for any size. Throws InvalidArgument, which names file and tensor, if it is missing, or has
  /// another dtype or shape.
  [[nodiscard]] Tensor tensor(const std::string& name, Dtype dtype, Shape shape) const;
  /// Throws InvalidArgument if there is no tensor of that name.
  [[nodiscard]] Dtype dtype(std::string_view name) const { return file_.tensor(name).dtype(); }
  /// Throws InvalidArgument if the file does not say.
  [[nodiscard]] const std::string& about(const std::string& name) const;

  /// Throws InvalidArgument with the fields in which about(name) differs from `mine`, and both values. Both are JSON
  /// objects. `free`: path suffixes of fields that may differ, for example "/memory/file".
  void expect_same(const std::string& name, std::string_view mine, std::span<const std::string_view> free = {}) const;

  /// The name of this file in messages.
  [[nodiscard]] const std::string& where() const { return file_.where(); }

 private:
  explicit StateFile(io::SafetensorsFile file);
  io::SafetensorsFile file_;
};

}  // namespace kvkeep
