// SPDX-License-Identifier: Apache-2.0
#include "kvlab/published_calibration.h"

#include <charconv>
#include <string_view>
#include <utility>
#include <vector>

#include "kvkeep/core/error.h"
#include "torch_archive.h"

namespace kvkeep::lm {
namespace {

using calibration_detail::check_head_dim, calibration_detail::check_scaling, calibration_detail::kMostEntries,
    calibration_detail::style_called;

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
  KVKEEP_REQUIRE(good && layer >= 0 && head >= 0 && layer < kMostEntries && head < kMostEntries,
                 "read calibration: stats of ", where, " has the key \"", shortened(key),
                 "\"; allowed layer<number>_head<number>");
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
      KVKEEP_REQUIRE(layer >= 0 && head >= 0 && layer < kMostEntries && head < kMostEntries &&
                         c.heads.contains({static_cast<std::int32_t>(layer), static_cast<std::int32_t>(head)}),
                     "read calibration: sampled_heads in ", where, " names layer ", layer, ", head ", head,
                     ", but stats does not have it");
    }
  }
  return c;
}

}  // namespace

Calibration read_published_calibration(std::string_view bytes, const std::string& name) {
  KVKEEP_REQUIRE(bytes.starts_with("PK"), "read calibration: ", name,
                 " is not a zip archive as torch.save writes; is it truncated or damaged?");
  return from_archive(TorchArchive(bytes, name), name);
}

void save_published_calibration(const std::filesystem::path& file, const Calibration& c) {
  check_complete(c);
  TorchArchiveWriter out;
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

void use_published_calibrations() {
  use_calibration_reader([](std::string_view bytes) { return bytes.starts_with("PK"); }, read_published_calibration);
}

}  // namespace kvkeep::lm
