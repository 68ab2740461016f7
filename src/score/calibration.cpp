// SPDX-License-Identifier: Apache-2.0
#include "kvkeep/score/calibration.h"

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "kvkeep/core/error.h"
#include "kvkeep/io/atomic_file.h"
#include "kvkeep/io/safetensors.h"
#include "kvkeep/io/untrusted_json.h"

namespace kvkeep {
namespace calibration_detail {

RopeStyle style_called(const std::string& name, const std::string& where) {
  KVKEEP_REQUIRE(name == "half" || name == "interleaved", "read calibration: rope_style in ", where, " is \"",
                 shortened(name), "\"; allowed half, interleaved");
  return name == "half" ? RopeStyle::half : RopeStyle::interleaved;
}

void check_head_dim(std::int64_t dim, const std::string& where) {
  KVKEEP_REQUIRE(dim >= 2 && dim <= kMostEntries && dim % 2 == 0, "read calibration: head_dim in ", where, " is ", dim,
                 "; allowed an even number from 2 to ", kMostEntries);
}

void check_scaling(double scaling, const std::string& where) {
  KVKEEP_REQUIRE(std::isfinite(scaling) && scaling > 0, "read calibration: attention_scaling in ", where, " is ",
                 scaling, "; allowed a positive number");
}

}  // namespace calibration_detail

namespace {

using calibration_detail::check_head_dim, calibration_detail::check_scaling, calibration_detail::kMostEntries,
    calibration_detail::style_called;
using Json = nlohmann::json;

// ---- Safetensors ----------------------------------------------------------------------------------------------------

Calibration from_safetensors(const io::SafetensorsFile& file) {
  const std::string& where = file.where();
  const auto& metadata = file.metadata();
  const auto parsed = [&](const char* key) {
    const auto found = metadata.find(key);
    KVKEEP_REQUIRE(found != metadata.end(), "read calibration: metadata \"", key, "\" is missing in ", where,
                   "; a calibration file needs it");
    return io::parse_json(found->second).value;
  };
  KVKEEP_REQUIRE(metadata.contains("kvkeep_calibration"),
                 "read calibration: metadata \"kvkeep_calibration\" is missing in ", where,
                 ", so this is not a calibration file");
  KVKEEP_REQUIRE(metadata.at("kvkeep_calibration") == "1", "read calibration: ", where, " has format version ",
                 shortened(metadata.at("kvkeep_calibration")), "; allowed 1");
  Calibration c;
  const Json dim = parsed("head_dim");
  KVKEEP_REQUIRE(dim.is_number_unsigned() && dim.get<std::uint64_t>() <= kMostEntries, "read calibration: head_dim in ",
                 where, " is not a number; allowed an even number from 2 to ", kMostEntries);
  check_head_dim(dim.get<std::int64_t>(), where);
  c.head_dim = dim.get<std::int32_t>();
  KVKEEP_REQUIRE(metadata.contains("rope_style"), "read calibration: metadata \"rope_style\" is missing in ", where,
                 "; allowed half, interleaved");
  c.rope_style = style_called(metadata.at("rope_style"), where);
  if (metadata.contains("model_name")) c.model_name = metadata.at("model_name");
  if (metadata.contains("attention_scaling")) {
    const Json scaling = parsed("attention_scaling");
    check_scaling(scaling.is_number() ? scaling.get<double>() : 0.0, where);
    c.attention_scaling = scaling.get<double>();
  }
  if (metadata.contains("inv_freq")) {
    const Json frequencies = parsed("inv_freq");
    KVKEEP_REQUIRE(
        frequencies.is_array() &&
            std::all_of(frequencies.begin(), frequencies.end(), [](const Json& f) { return f.is_number(); }) &&
            static_cast<std::int64_t>(frequencies.size()) == c.pairs(),
        "read calibration: inv_freq in ", where, " is not an array of head_dim / 2 = ", c.pairs(), " numbers");
    c.inv_freq = frequencies.get<std::vector<double>>();
  }
  const auto tensor = [&](const char* name, std::int64_t dimensions) {
    const Tensor t = file.tensor(name);
    KVKEEP_REQUIRE(t.dtype() == Dtype::f32 && t.dim() == dimensions && t.size(2) == c.pairs() && t.size(0) >= 1 &&
                       t.size(1) >= 1 && t.size(0) <= kMostEntries && t.size(1) <= kMostEntries,
                   "read calibration: tensor \"", name, "\" in ", where, " has dtype ", t.dtype(), " and ", t.dim(),
                   " dimensions; allowed f32 [L, Hq, ", c.pairs(), dimensions == 4 ? ", 2]" : "]");
    return t;
  };
  const Tensor mean = tensor("q_mean", 4), modulus = tensor("q_abs_mean", 3);
  KVKEEP_REQUIRE(mean.size(3) == 2 && mean.size(0) == modulus.size(0) && mean.size(1) == modulus.size(1),
                 "read calibration: q_mean and q_abs_mean in ", where,
                 " do not match; allowed [L, Hq, F, 2] and [L, Hq, F]");
  const std::int64_t layers = mean.size(0), heads = mean.size(1), pairs = c.pairs();
  std::vector<std::int32_t> numbers;
  if (metadata.contains("layers")) {
    const Json given = parsed("layers");
    KVKEEP_REQUIRE(given.is_array() && static_cast<std::int64_t>(given.size()) == layers,
                   "read calibration: metadata \"layers\" in ", where, " is not an array of ", layers,
                   " layer numbers");
    for (const Json& l : given) {
      KVKEEP_REQUIRE(l.is_number_unsigned() && l.get<std::uint64_t>() < kMostEntries,
                     "read calibration: metadata \"layers\" in ", where, " names layer ", io::shown(l),
                     "; allowed 0 to ", kMostEntries - 1);
      KVKEEP_REQUIRE(std::find(numbers.begin(), numbers.end(), l.get<std::int32_t>()) == numbers.end(),
                     "read calibration: metadata \"layers\" in ", where, " names layer ", io::shown(l), " twice");
      numbers.push_back(l.get<std::int32_t>());
    }
  } else {
    for (std::int32_t l = 0; l < layers; ++l) numbers.push_back(l);
  }
  const float *from = mean.data<float>(), *size = modulus.data<float>();
  for (std::int64_t l = 0; l < layers; ++l)
    for (std::int64_t h = 0; h < heads; ++h, size += pairs) {
      Calibration::Head& head = c.heads[{numbers[static_cast<std::size_t>(l)], static_cast<std::int32_t>(h)}];
      head.q_abs_mean.assign(size, size + pairs);
      for (std::int64_t f = 0; f < pairs; ++f, from += 2) head.q_mean.emplace_back(from[0], from[1]);
    }
  return c;
}

struct {
  bool (*takes)(std::string_view bytes) = nullptr;
  CalibrationReader read = nullptr;
} reader_of_others;

}  // namespace

void use_calibration_reader(bool (*takes)(std::string_view bytes), CalibrationReader reader) {
  reader_of_others = {takes, reader};
}

Calibration read_calibration(std::string_view bytes, const std::string& name) {
  constexpr std::size_t kLengthBytes = 8;
  if (reader_of_others.takes != nullptr && reader_of_others.takes(bytes)) return reader_of_others.read(bytes, name);
  KVKEEP_REQUIRE(bytes.size() <= kLengthBytes || !bytes.starts_with("PK"), "read calibration: ", name,
                 " is a file of torch.save; allowed safetensors, to which docs/method/calibration.md converts it");
  KVKEEP_REQUIRE(bytes.size() > kLengthBytes && bytes[kLengthBytes] == '{', "read calibration: ", name,
                 " is not a safetensors file; is it truncated or damaged?");
  return from_safetensors(io::SafetensorsFile::from_bytes(bytes, name));
}

Calibration load_calibration(const std::filesystem::path& file) {
  return read_calibration(io::read_file(file, "read calibration"), file.string());
}

std::vector<std::int32_t> check_complete(const Calibration& c) {
  std::set<std::int32_t> layers;
  for (const auto& [place, head] : c.heads) layers.insert(place.first);
  std::vector<std::int32_t> numbers(layers.begin(), layers.end());
  const std::int32_t heads = c.query_heads(numbers);
  const std::int64_t pairs = c.pairs();
  KVKEEP_REQUIRE(!numbers.empty(), "save calibration: no heads to save; allowed one or more layers");
  for (const std::int32_t l : numbers)
    for (std::int32_t h = 0; h < heads; ++h) {
      const auto head = c.heads.find({l, h});
      KVKEEP_REQUIRE(head != c.heads.end(), "save calibration: layer ", l, ", head ", h,
                     " is missing; allowed every head of a layer");
      KVKEEP_REQUIRE(static_cast<std::int64_t>(head->second.q_mean.size()) == pairs &&
                         static_cast<std::int64_t>(head->second.q_abs_mean.size()) == pairs,
                     "save calibration: layer ", l, ", head ", h, " does not hold head_dim / 2 = ", pairs, " numbers");
    }
  return numbers;
}

void save_calibration(const std::filesystem::path& file, const Calibration& c) {
  const std::vector<std::int32_t> numbers = check_complete(c);
  const std::int64_t heads = c.query_heads(numbers), pairs = c.pairs();
  const auto count = static_cast<std::int64_t>(numbers.size());
  const Tensor mean = empty({count, heads, pairs, 2}, Dtype::f32), modulus = empty({count, heads, pairs}, Dtype::f32);
  float *m = mean.data<float>(), *a = modulus.data<float>();
  for (const auto& [place, head] : c.heads) {
    for (const std::complex<float>& z : head.q_mean) {
      *m++ = z.real();
      *m++ = z.imag();
    }
    a = std::copy(head.q_abs_mean.begin(), head.q_abs_mean.end(), a);
  }
  std::map<std::string, std::string> metadata{{"kvkeep_calibration", "1"},
                                              {"head_dim", std::to_string(c.head_dim)},
                                              {"rope_style", name_of(c.rope_style)},
                                              {"attention_scaling", Json(c.attention_scaling).dump()},
                                              {"model_name", c.model_name}};
  if (!c.inv_freq.empty()) metadata["inv_freq"] = Json(c.inv_freq).dump();
  if (numbers.back() + 1 != static_cast<std::int32_t>(numbers.size())) metadata["layers"] = Json(numbers).dump();
  io::write_safetensors(file, {{"q_mean", mean}, {"q_abs_mean", modulus}}, metadata);
}

}  // namespace kvkeep
