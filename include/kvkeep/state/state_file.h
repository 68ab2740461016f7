#pragma once
/// Files that hold what is known of one sequence: safetensors that carry what they belong to and a checksum over all of
/// it.

#include <cstdint>
#include <filesystem>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/core/tensor.h"
#include "kvkeep/io/safetensors.h"

namespace kvkeep {

/// Names and tensors, in the order in which they lie in the file.
using StateTensors = std::vector<std::pair<std::string, Tensor>>;

/// Writes what StateFile::open() reads, whole or not at all; a file of that name is replaced. `about`: what the tensors
/// belong to, by name. Throws as io::write_safetensors. Cost: one checksum and one copy to the file, then fsync.
void write_state(const std::filesystem::path& file, const StateTensors& tensors,
                 std::map<std::string, std::string> about);

/// One file, as a copy in memory: nothing in it was changed since it was written. That says nothing of who wrote it, so
/// whoever reads it checks what it means.
class StateFile {
 public:
  /// Throws InvalidArgument that names the file: where it cannot be read, is no state of a sequence, has a version that
  /// is not known, is cut off, or is not what was written; DeviceError where there is no memory for it. Cost: one read
  /// and one checksum of the file, which stays in memory as long as this or a tensor of it.
  [[nodiscard]] static StateFile open(const std::filesystem::path& file);

  [[nodiscard]] bool has(std::string_view name) const { return file_.has(name); }
  /// Read-only. `shape`: -1 for any size. Throws InvalidArgument that names file and tensor where it is not there, or
  /// has another dtype or shape.
  [[nodiscard]] Tensor tensor(const std::string& name, ScalarType dtype, at::IntArrayRef shape) const;
  /// Throws InvalidArgument where there is none of that name.
  [[nodiscard]] ScalarType dtype(std::string_view name) const { return file_.tensor(name).scalar_type(); }
  /// Throws InvalidArgument where the file does not say.
  [[nodiscard]] const std::string& about(const std::string& name) const;

  /// Throws InvalidArgument with every field in which about(name) differs from `mine`, and both values. Both are JSON
  /// objects. `free`: ends of the paths of fields that may differ, "/memory/file" for one.
  void expect_same(const std::string& name, std::string_view mine, std::span<const std::string_view> free = {}) const;

  /// What messages call this file.
  [[nodiscard]] const std::string& where() const { return file_.where(); }

 private:
  explicit StateFile(io::SafetensorsFile file) : file_(std::move(file)) {}
  io::SafetensorsFile file_;
};

}  // namespace kvkeep
