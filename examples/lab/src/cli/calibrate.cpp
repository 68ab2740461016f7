// SPDX-License-Identifier: Apache-2.0
// kvkeep calibrate: the query statistics of each head, for TriAttention.

#include <CLI/Option.hpp>
#include <CLI/Validators.hpp>
#include <algorithm>
#include <filesystem>
#include <limits>
#include <utility>

#include "commands.h"
#include "kvkeep/cli/options.h"
#include "kvkeep/cli/program.h"
#include "kvkeep/core/error.h"
#include "kvkeep/io/untrusted_json.h"
#include "kvlab/calibrate.h"
#include "kvlab/published_calibration.h"
#include "model_options.h"

namespace kvkeep::cli {
namespace {

namespace fs = std::filesystem;

constexpr const char* kCalibrateExamples = R"(
Examples:
  kvkeep calibrate --model examples/model --task ask --out model.calibration.safetensors
  kvkeep calibrate --model DIR --ids-file text.ids --tokens 32768 --out model.pt --layout pt

Then: kvkeep generate --model examples/model --task ask \
          --policy triattention,budget=96,calibration=model.calibration.safetensors

Given ids run once, from position 0, up to --tokens of them. A task supplies samples of consecutive seeds, each from
position 0, as many whole ones as fit.
)";

struct CalibrateOptions {
  ModelOptions model;
  OutputOptions output;
  PromptOptions prompt;
  std::string out, layout = "safetensors";
  std::int32_t tokens = 32768, skip = 4;
};

std::vector<std::vector<std::int32_t>> sequences_of(const CalibrateOptions& o) {
  if (o.prompt.task.empty()) {
    std::vector<std::int32_t> ids = o.prompt.read(o.model.folder).ids;
    ids.resize(std::min(ids.size(), static_cast<std::size_t>(o.tokens)));
    return {std::move(ids)};
  }
  std::vector<std::vector<std::int32_t>> samples;
  PromptOptions prompt = o.prompt;
  for (std::int64_t left = o.tokens;; ++prompt.seed) {
    std::vector<std::int32_t> ids = prompt.read(o.model.folder).sample->ids;
    left -= static_cast<std::int64_t>(ids.size());
    if (left < 0 && !samples.empty()) return samples;
    KVKEEP_REQUIRE(left >= 0, "calibrate: a sample has ", ids.size(), " tokens and --tokens is ", o.tokens,
                   "; allowed at least one sample");
    samples.push_back(std::move(ids));
  }
}

// |q_mean| / q_abs_mean of the heads of one layer, weighted by q_abs_mean. 1: all queries of a head point the same way.
struct Concentration {
  double least = std::numeric_limits<double>::infinity(), sum = 0, most = 0;
};

double concentration_of(const Calibration::Head& head) {
  double mean = 0, modulus = 0;
  for (std::size_t f = 0; f < head.q_mean.size(); ++f) {
    mean += static_cast<double>(std::abs(head.q_mean[f]));
    modulus += static_cast<double>(head.q_abs_mean[f]);
  }
  return modulus > 0 ? mean / modulus : 0;
}

void run(const CalibrateOptions& o) {
  const std::vector<std::vector<std::int32_t>> sequences = sequences_of(o);
  std::int64_t tokens = 0, counted = 0;
  for (const auto& ids : sequences) {
    tokens += static_cast<std::int64_t>(ids.size());
    counted += std::max<std::int64_t>(static_cast<std::int64_t>(ids.size()) - o.skip, 0);
  }
  lm::Decoder decoder = o.model.open();
  Progress progress(tokens, o.output.quiet);
  progress.label("tokens");
  std::error_code none;  // only a label: empty if there is no such path
  const fs::path folder = fs::weakly_canonical(o.model.folder, none);
  const Calibration calibration = lm::calibrate(decoder, sequences,
                                                {.skip = o.skip,
                                                 .cache_dtype = o.model.dtype(),
                                                 .model_name = io::in_utf8(folder.filename().string()),
                                                 .progress = [&, before = std::int64_t{0}](std::int64_t done) mutable {
                                                   progress.advance(done - std::exchange(before, done));
                                                 }});
  progress.clear();
  if (o.layout == "pt")
    lm::save_published_calibration(o.out, calibration);
  else
    save_calibration(o.out, calibration);

  Table table({{"layer", "layer"},
               {"query_heads", "query heads"},
               {"tokens", "tokens"},
               {"least", "least concentrated"},
               {"mean", "mean"},
               {"most", "most concentrated"}});
  for (std::int32_t l = 0; l < decoder.spec().num_layers(); ++l) {
    Concentration c;
    for (std::int32_t h = 0; h < decoder.spec().query_heads; ++h) {
      const double r = concentration_of(calibration.heads.at({l, h}));
      c.least = std::min(c.least, r);
      c.most = std::max(c.most, r);
      c.sum += r;
    }
    table.add({l, decoder.spec().query_heads, counted, real_cell(c.least, 3),
               real_cell(c.sum / decoder.spec().query_heads, 3), real_cell(c.most, 3)});
  }
  if (o.output.format == Format::json)
    print(io::written(table.json()) + "\n");
  else
    print(table.text(o.output.format));
}

}  // namespace

Run add_calibrate(CLI::App& app) {
  CLI::App* sub = app.add_subcommand("calibrate", "write the query statistics of a model, for triattention");
  auto o = std::make_shared<CalibrateOptions>();
  o->model.add(*sub);
  o->prompt.add(*sub);
  sub->add_option("--tokens", o->tokens, "run at most this many")
      ->check(CLI::Range(1, 1 << 24))
      ->option_text("N [32768]");
  sub->add_option("--skip", o->skip, "oldest tokens of every sequence to leave out of the statistics")
      ->check(CLI::Range(0, 1 << 24))
      ->option_text("N [4]");
  sub->add_option("--layout", o->layout, "layout of the file: kvkeep's, or that of TriAttention's own tool")
      ->check(one_of({"safetensors", "pt"}))
      ->option_text("safetensors|pt [safetensors]");
  as_output(sub->add_option("--out", o->out, "the calibration file to write"))->required()->option_text("FILE");
  o->output.add(*sub);
  sub->footer(kCalibrateExamples);
  return [o] { run(*o); };
}

}  // namespace kvkeep::cli
