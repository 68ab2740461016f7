#include "kvkeep/io/calibration-inl.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <nlohmann/json.hpp>
#include <set>

#include "kvkeep/core/error.h"
#include "kvkeep/io/read_file.h"
#include "kvkeep/io/safetensors.h"
#include "kvkeep/io/untrusted_json.h"
#include "torch_archive.h"

namespace kvkeep {
namespace {

using io::TorchArchive;
using Json = nlohmann::json;

constexpr std::int64_t kMost = 1 << 16;  ///< layers, heads and components of a head

RopeStyle style_called(const std::string& name, const std::string& where) {
  KVKEEP_REQUIRE(name == "half" || name == "interleaved", "read calibration: rope_style in ", where, " is \"",
                 shortened(name), "\"; allowed half, interleaved");
  return name == "half" ? RopeStyle::half : RopeStyle::interleaved;
}

void check_head_dim(std::int64_t dim, const std::string& where) {
  KVKEEP_REQUIRE(dim >= 2 && dim <= kMost && dim % 2 == 0, "read calibration: head_dim in ", where, " is ", dim,
                 "; allowed an even number from 2 to ", kMost);
}

void check_scaling(double scaling, const std::string& where) {
  KVKEEP_REQUIRE(std::isfinite(scaling) && scaling > 0, "read calibration: attention_scaling in ", where, " is ",
                 scaling, "; allowed a positive number");
}

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
  KVKEEP_REQUIRE(dim.is_number_unsigned() && dim.get<std::uint64_t>() <= kMost, "read calibration: head_dim in ", where,
                 " is not a number; allowed an even number from 2 to ", kMost);
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
                       t.size(1) >= 1 && t.size(0) <= kMost && t.size(1) <= kMost,
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
      KVKEEP_REQUIRE(l.is_number_unsigned() && l.get<std::uint64_t>() < kMost,
                     "read calibration: metadata \"layers\" in ", where, " names layer ", io::shown(l),
                     "; allowed 0 to ", kMost - 1);
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

// ---- Files of the published tool ---------------------------------------------------------------------------------

const TorchArchive::Value& member(const TorchArchive::Value& dict, const char* key, TorchArchive::Kind kind,
                                  const std::string& subject, const char* allowed) {
  const TorchArchive::Value* found = TorchArchive::find(dict, key);
  KVKEEP_REQUIRE(found != nullptr, "read calibration: ", subject, " has no \"", key, "\"; allowed ", allowed);
  KVKEEP_REQUIRE(found->kind == kind, "read calibration: \"", key, "\" of ", subject, " is of the wrong type; allowed ",
                 allowed);
  return *found;
}

/// "layer05_head13"
std::pair<std::int32_t, std::int32_t> place_of(const std::string& key, const std::string& where) {
  constexpr std::string_view kLayer = "layer", kHead = "_head";
  std::int32_t layer = -1, head = -1;
  const char* end = key.data() + key.size();
  bool good = key.starts_with(kLayer);
  if (good) {
    const auto [after, error] = std::from_chars(key.data() + kLayer.size(), end, layer);
    good = error == std::errc() && std::string_view(after, end).starts_with(kHead);
    if (good) {
      const auto [last, wrong] = std::from_chars(after + kHead.size(), end, head);
      good = wrong == std::errc() && last == end;
    }
  }
  KVKEEP_REQUIRE(good && layer >= 0 && head >= 0 && layer < kMost && head < kMost, "read calibration: stats of ", where,
                 " has the key \"", shortened(key), "\"; allowed layer<number>_head<number>");
  return {layer, head};
}

Calibration from_archive(const TorchArchive& archive, const std::string& where) {
  using Kind = TorchArchive::Kind;
  using Value = TorchArchive::Value;
  KVKEEP_REQUIRE(archive.root().kind == Kind::dict, "read calibration: ", where,
                 " does not hold a dict; allowed {\"metadata\": ..., \"stats\": ...}");
  const Value& metadata = member(archive.root(), "metadata", Kind::dict, where, "a dict");
  const Value& stats = member(archive.root(), "stats", Kind::dict, where, "a dict");
  const std::string about = "the metadata of " + where;
  Calibration c;
  const std::int64_t dim = member(metadata, "head_dim", Kind::integer, about, "a number").integer;
  check_head_dim(dim, where);
  c.head_dim = static_cast<std::int32_t>(dim);
  c.rope_style = style_called(member(metadata, "rope_style", Kind::string, about, "half, interleaved").text, where);
  if (const Value* name = TorchArchive::find(metadata, "model_name"); name != nullptr && name->kind == Kind::string)
    c.model_name = name->text;
  const auto number = [&](const Value& v, const char* field) {
    KVKEEP_REQUIRE(v.kind == Kind::real || v.kind == Kind::integer, "read calibration: ", field, " in ", where,
                   " is not a number");
    return v.kind == Kind::real ? v.real : static_cast<double>(v.integer);
  };
  if (const Value* scaling = TorchArchive::find(metadata, "attention_scaling");
      scaling != nullptr && scaling->kind != Kind::none) {
    c.attention_scaling = number(*scaling, "attention_scaling");
    check_scaling(c.attention_scaling, where);
  }
  if (const Value* frequencies = TorchArchive::find(metadata, "inv_freq");
      frequencies != nullptr && frequencies->kind != Kind::none) {
    if (frequencies->kind == Kind::list) {
      KVKEEP_REQUIRE(static_cast<std::int64_t>(frequencies->items.size()) == c.pairs(),
                     "read calibration: inv_freq in ", where, " has ", frequencies->items.size(),
                     " numbers; allowed head_dim / 2 = ", c.pairs());
      for (const Value* f : frequencies->items) c.inv_freq.push_back(number(*f, "inv_freq"));
    } else {
      c.inv_freq = archive.numbers(*frequencies, c.pairs(), "inv_freq");
    }
  }
  for (std::size_t i = 0; i < stats.items.size(); i += 2) {
    KVKEEP_REQUIRE(stats.items[i]->kind == Kind::string, "read calibration: stats of ", where,
                   " has a key that is not a string; allowed layer<number>_head<number>");
    const std::string& key = stats.items[i]->text;
    Calibration::Head& head = c.heads[place_of(key, where)];
    KVKEEP_REQUIRE(head.q_mean.empty(), "read calibration: stats of ", where, " has ", shortened(key),
                   " twice; allowed once");
    const auto column = [&](const char* name) {
      const Value* tensor = TorchArchive::find(*stats.items[i + 1], name);
      KVKEEP_REQUIRE(tensor != nullptr, "read calibration: ", key, " of ", where, " has no \"", name,
                     "\"; allowed q_mean_real, q_mean_imag and q_abs_mean");
      return archive.numbers(*tensor, c.pairs(), key + "." + name);
    };
    const std::vector<double> real = column("q_mean_real"), imaginary = column("q_mean_imag"),
                              modulus = column("q_abs_mean");
    for (std::size_t f = 0; f < real.size(); ++f) {
      head.q_mean.emplace_back(static_cast<float>(real[f]), static_cast<float>(imaginary[f]));
      head.q_abs_mean.push_back(static_cast<float>(modulus[f]));
    }
  }
  KVKEEP_REQUIRE(!c.heads.empty(), "read calibration: stats of ", where,
                 " is empty; allowed one entry per (layer, query head)");
  if (const Value* sampled = TorchArchive::find(metadata, "sampled_heads");
      sampled != nullptr && sampled->kind != Kind::none) {
    KVKEEP_REQUIRE(sampled->kind == Kind::list, "read calibration: sampled_heads in ", where,
                   " is not a list; allowed [[layer, head], ...]");
    for (const Value* pair : sampled->items) {
      KVKEEP_REQUIRE(pair->kind == Kind::list && pair->items.size() == 2 && pair->items[0]->kind == Kind::integer &&
                         pair->items[1]->kind == Kind::integer,
                     "read calibration: sampled_heads in ", where,
                     " holds an entry that is not a pair; allowed [layer, head]");
      const std::int64_t layer = pair->items[0]->integer, head = pair->items[1]->integer;
      KVKEEP_REQUIRE(layer >= 0 && head >= 0 && layer < kMost && head < kMost &&
                         c.heads.contains({static_cast<std::int32_t>(layer), static_cast<std::int32_t>(head)}),
                     "read calibration: sampled_heads in ", where, " names layer ", layer, ", head ", head,
                     ", but stats does not have it");
    }
  }
  return c;
}

}  // namespace

Calibration read_calibration(std::string_view bytes, const std::string& name) {
  constexpr std::size_t kLengthBytes = 8;
  if (bytes.starts_with("PK")) return from_archive(TorchArchive(bytes, name), name);
  KVKEEP_REQUIRE(bytes.size() > kLengthBytes && bytes[kLengthBytes] == '{', "read calibration: ", name,
                 " is neither a safetensors file nor a zip archive as torch.save writes; is it truncated or damaged?");
  return from_safetensors(io::SafetensorsFile::from_bytes(bytes, name));
}

Calibration load_calibration(const std::filesystem::path& file) {
  return read_calibration(io::read_file(file, "read calibration"), file.string());
}

void save_calibration(const std::filesystem::path& file, const Calibration& c, CalibrationLayout layout) {
  std::set<std::int32_t> layers;
  for (const auto& [place, head] : c.heads) layers.insert(place.first);
  const std::vector<std::int32_t> numbers(layers.begin(), layers.end());
  const std::int32_t heads = c.query_heads(numbers);
  const std::int64_t pairs = c.pairs();
  KVKEEP_REQUIRE(!numbers.empty(), "save calibration: no heads to save in ", file.string(),
                 "; allowed one or more layers");
  for (const std::int32_t l : numbers)
    for (std::int32_t h = 0; h < heads; ++h) {
      const auto head = c.heads.find({l, h});
      KVKEEP_REQUIRE(head != c.heads.end(), "save calibration: layer ", l, ", head ", h,
                     " is missing; allowed every head of a layer");
      KVKEEP_REQUIRE(static_cast<std::int64_t>(head->second.q_mean.size()) == pairs &&
                         static_cast<std::int64_t>(head->second.q_abs_mean.size()) == pairs,
                     "save calibration: layer ", l, ", head ", h, " does not hold head_dim / 2 = ", pairs, " numbers");
    }
  if (layout == CalibrationLayout::safetensors) {
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
    return;
  }
  io::TorchArchiveWriter out;
  out.begin_dict();
  out.string("metadata");
  out.begin_dict();
  out.string("head_dim");
  out.integer(c.head_dim);
  out.string("rope_style");
  out.string(name_of(c.rope_style));
  out.string("sampled_heads");
  out.begin_list();
  for (const auto& [place, head] : c.heads) {
    out.begin_list();
    out.integer(place.first);
    out.integer(place.second);
    out.end_list();
  }
  out.end_list();
  out.string("model_name");
  out.string(c.model_name);
  if (!c.inv_freq.empty()) {
    out.string("inv_freq");
    out.begin_list();
    for (const double f : c.inv_freq) out.real(f);
    out.end_list();
  }
  out.string("attention_scaling");
  out.real(c.attention_scaling);
  out.end_dict();
  out.string("stats");
  out.begin_dict();
  for (const auto& [place, head] : c.heads) {
    const auto two = [](std::int32_t n) { return text(n < 10 ? "0" : "", n); };
    out.string(text("layer", two(place.first), "_head", two(place.second)));
    std::vector<float> real, imaginary;
    for (const std::complex<float>& z : head.q_mean) {
      real.push_back(z.real());
      imaginary.push_back(z.imag());
    }
    out.begin_dict();
    out.string("q_mean_real");
    out.tensor(real);
    out.string("q_mean_imag");
    out.tensor(imaginary);
    out.string("q_abs_mean");
    out.tensor(head.q_abs_mean);
    out.end_dict();
  }
  out.end_dict();
  out.end_dict();
  out.save(file);
}

}  // namespace kvkeep
