// SPDX-License-Identifier: Apache-2.0
#pragma once
/// Files that torch.save writes: a zip archive of a pickled object and the storages of its tensors. A reader that runs
/// nothing it finds, and a writer.

#include <cstdint>
#include <deque>
#include <filesystem>
#include <map>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace kvkeep::lm {

/// One opened archive. Objects: None, booleans, integers up to 64 bits, floats, strings, lists and tuples, dicts,
/// tensors. Names of classes and functions are kept as such; the only ones that are called are those that make tensors
/// and empty dicts, and they are called here, not in Python.
///
/// Refused with one sentence: a zip directory that is missing, cut or leads outside the file, compressed or encrypted
/// records, a record whose checksum is wrong, a pickle that ends early or asks for anything else, big-endian storages,
/// views that leave their storage. Why not LibTorch's reader: here every checksum, every view against its storage and
/// every size is checked before anything is allocated, and the message names what is wrong.
class TorchArchive {
 public:
  enum class Kind : std::uint8_t { none, boolean, integer, real, string, list, dict, global, storage, tensor };

  struct Value {
    Kind kind = Kind::none;
    std::int64_t integer = 0;  ///< boolean, integer; number of elements of a storage; offset of a tensor
    double real = 0;
    std::string text;  ///< string; name of a global ("module name"); key of a storage
    std::vector<const Value*>
        items;  ///< list; dict: key, value, key, value; storage: its class; tensor: storage, sizes, strides
  };

  /// `bytes` must outlive the archive. `name` stands for the file in messages.
  TorchArchive(std::string_view bytes, std::string name);
  TorchArchive(const TorchArchive&) = delete;
  TorchArchive& operator=(const TorchArchive&) = delete;

  [[nodiscard]] const Value& root() const { return *root_; }

  /// Value of a string key in a dict; null if there is none or `dict` is not a dict.
  [[nodiscard]] static const Value* find(const Value& dict, std::string_view key);

  /// A one-dimensional floating-point tensor of `count` elements. `what` names it in messages.
  [[nodiscard]] std::vector<double> numbers(const Value& tensor, std::int64_t count, const std::string& what) const;

 private:
  class Unpickler;
  void read_directory();
  [[nodiscard]] std::string_view record(const std::string& name) const;

  std::string_view bytes_;
  std::string name_;
  std::string prefix_;                               ///< folder inside the archive, with '/'
  std::map<std::string, std::string_view> records_;  ///< by full name
  std::deque<Value> values_;                         ///< everything the pickle made
  const Value* root_ = nullptr;
};

/// Builds an archive that torch.load(weights_only=True) opens. Calls follow the order of the object; `end_dict` and
/// `end_list` close the object that was begun last.
class TorchArchiveWriter {
 public:
  TorchArchiveWriter();
  void begin_dict();
  void end_dict();
  void begin_list();
  void end_list();
  void string(std::string_view text);
  void integer(std::int32_t value);
  void real(double value);
  void tensor(const std::vector<float>& values);  ///< f32 [n], contiguous, with its own storage

  /// Writes the whole file or nothing.
  void save(const std::filesystem::path& file);

 private:
  void little_endian(std::uint64_t value, int bytes);
  std::string pickle_;
  std::vector<std::string> storages_;
};

}  // namespace kvkeep::lm
