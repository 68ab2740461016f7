// SPDX-License-Identifier: Apache-2.0
/* A small engine in C: random keys, values and queries, a prompt and 200 tokens after it. The first number of each key
 * and value is its token, so what the rows hold can be compared with what the keeper says. Ends with 0 if they agree.
 *
 *   cc -std=c99 engine.c $(pkg-config --cflags --libs kvkeep) -Wl,-rpath,$(pkg-config --variable=libdir kvkeep)
 */
#include <kvkeep/c.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, QUERY_HEADS = 4, HEADS = 2, DIM = 8, CAPACITY = 96, PROMPT = 60, TOKENS = 200, BUDGET = 40 };

static float keys[LAYERS][HEADS][CAPACITY][DIM], values[LAYERS][HEADS][CAPACITY][DIM];
static uint64_t dice = 1;

static float number(void) {
  dice = dice * 6364136223846793005ULL + 1442695040888963407ULL;
  return (float)((double)(dice >> 40) / 8388608.0 - 1.0);
}

static void stop(const char* where) {
  fprintf(stderr, "%s: %s\n", where, kvkeep_last_error());
  exit(1);
}

/* Contiguous f32 in host memory. */
static kvkeep_tensor f32(void* data, int32_t ndim, int64_t* shape) {
  kvkeep_tensor t;
  memset(&t, 0, sizeof t);
  t.data = data;
  t.device.type = KVKEEP_CPU;
  t.ndim = ndim;
  t.dtype.code = KVKEEP_FLOAT;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

static void run(const char* policy) {
  const double inv_freq[DIM / 2] = {1.0, 0.1, 0.01, 0.001};
  const int64_t id = 7;
  kvkeep_model model = {sizeof model, LAYERS,   QUERY_HEADS, HEADS, DIM,  DIM,  KVKEEP_ROPE_HALF,
                        DIM / 2,      inv_freq, 0,           0,     NULL, NULL, 0};
  kvkeep_keeper* keeper = NULL;
  int32_t length = 0, token = 0;
  int64_t events = 0, cache_shape[4] = {1, HEADS, CAPACITY, DIM};
  kvkeep_tensor key_tensors[LAYERS], value_tensors[LAYERS];
  kvkeep_layer_cache layers[LAYERS];
  int32_t l;
  if (kvkeep_keeper_make(&model, policy, NULL, &keeper) != KVKEEP_OK) stop("make");
  if (kvkeep_join(keeper, id, 0, PROMPT) != KVKEEP_OK) stop("join");

  memset(layers, 0, sizeof layers);
  for (l = 0; l < LAYERS; ++l) {
    key_tensors[l] = f32(keys[l], 4, cache_shape);
    value_tensors[l] = f32(values[l], 4, cache_shape);
    layers[l].form = KVKEEP_DENSE;
    layers[l].keys = &key_tensors[l];
    layers[l].values = &value_tensors[l];
  }
  if (kvkeep_bind(keeper, layers) != KVKEEP_OK) stop("bind");

  while (token < PROMPT + TOKENS) {
    static float queries[PROMPT][QUERY_HEADS][DIM];
    const int32_t fed = token == 0 ? PROMPT : 1;
    const int32_t indptr[2] = {0, fed};
    int64_t query_shape[3] = {fed, QUERY_HEADS, DIM};
    kvkeep_report report;
    kvkeep_cache cache;
    int32_t h, t, d;

    for (l = 0; l < LAYERS; ++l) {
      kvkeep_tensor query_tensor = f32(queries, 3, query_shape);
      kvkeep_observation seen;
      for (t = 0; t < fed; ++t) {
        for (h = 0; h < QUERY_HEADS; ++h)
          for (d = 0; d < DIM; ++d) queries[t][h][d] = number();
        for (h = 0; h < HEADS; ++h)
          for (d = 0; d < DIM; ++d) {
            keys[l][h][length + t][d] = d == 0 ? (float)(token + t) / 64 : number();
            values[l][h][length + t][d] = d == 0 ? (float)(token + t) : number();
          }
      }
      memset(&seen, 0, sizeof seen);
      seen.size = sizeof seen;
      seen.layer = l;
      seen.num_sequences = 1;
      seen.sequences = &id;
      seen.indptr = indptr;
      seen.queries = &query_tensor;
      if (kvkeep_observe(keeper, &seen) != KVKEEP_OK) stop("observe");
    }
    token += fed;
    length += fed;

    memset(&cache, 0, sizeof cache);
    cache.size = sizeof cache;
    cache.num_sequences = 1;
    cache.sequences = &id;
    cache.lengths = &length;
    cache.rows_per_sequence = 1;
    report.size = sizeof report;
    if (kvkeep_step(keeper, &cache, &report) != KVKEEP_OK) stop("step");
    events += report.num_cuts;

    for (l = 0; l < LAYERS; ++l)
      for (h = 0; h < HEADS; ++h) {
        const int32_t* positions = NULL;
        int64_t count = 0, i;
        if (kvkeep_positions(keeper, id, l, h, &positions, &count) != KVKEEP_OK) stop("positions");
        if (count != length) fprintf(stderr, "%d slots, %d positions\n", (int)length, (int)count), exit(1);
        for (i = 0; i < count; ++i)
          if (values[l][h][i][0] != (float)positions[i] || keys[l][h][i][0] != (float)positions[i] / 64)
            fprintf(stderr, "slot %d is token %g, not %d\n", (int)i, values[l][h][i][0], (int)positions[i]), exit(1);
      }
  }
  if (length > BUDGET + 16 || events < 5)
    fprintf(stderr, "%d slots after %d events\n", (int)length, (int)events), exit(1);
  if (kvkeep_leave(keeper, 8) != KVKEEP_STATE_ERROR || strstr(kvkeep_last_error(), "sequence 8 is not known") == NULL)
    stop("an unknown sequence");
  kvkeep_keeper_free(keeper);
  printf("%s: %d events\n", policy, (int)events);
}

int main(void) {
  if (kvkeep_c_version() != KVKEEP_C_VERSION) return 1;
  run("ams-tova,budget=40,interval=16");
  run("{\"policy\": \"keydiff\", \"budget\": 40, \"interval\": 16}");
  return 0;
}
