// SPDX-License-Identifier: Apache-2.0
/* A small engine in C on a GPU, with memory and a stream of CUDA's own. The first number of each value is its token, so
 * what the rows hold at the end can be compared with what the keeper says. Ends with 0 if they agree, with 77 where
 * there is no GPU.
 */
#include <cuda_runtime_api.h>
#include <kvkeep/c_cuda.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { LAYERS = 2, QUERY_HEADS = 4, HEADS = 2, DIM = 8, CAPACITY = 96, PROMPT = 60, TOKENS = 200 };

static uint64_t dice = 1;

static float number(void) {
  dice = dice * 6364136223846793005ULL + 1442695040888963407ULL;
  return (float)((double)(dice >> 40) / 8388608.0 - 1.0);
}

static void check(kvkeep_status status) {
  if (status == KVKEEP_OK) return;
  fprintf(stderr, "kvkeep: %s\n", kvkeep_last_error());
  exit(1);
}

static void check_cuda(cudaError_t status) {
  if (status == cudaSuccess) return;
  fprintf(stderr, "CUDA: %s\n", cudaGetErrorString(status));
  exit(1);
}

/* Contiguous f32 on GPU 0. */
static kvkeep_tensor f32(int32_t ndim, int64_t* shape) {
  kvkeep_tensor t;
  size_t bytes = sizeof(float);
  int32_t d;
  memset(&t, 0, sizeof t);
  for (d = 0; d < ndim; ++d) bytes *= (size_t)shape[d];
  check_cuda(cudaMalloc(&t.data, bytes));
  t.device.type = KVKEEP_CUDA;
  t.ndim = ndim;
  t.dtype.code = KVKEEP_FLOAT;
  t.dtype.bits = 32;
  t.dtype.lanes = 1;
  t.shape = shape;
  return t;
}

/* Stands for the model: `tokens` new rows of every head behind the `length` that the cache holds. */
static void write_rows(const kvkeep_tensor* rows, int32_t length, int32_t tokens, int32_t first, cudaStream_t stream) {
  static float fresh[HEADS][PROMPT * DIM];
  int32_t h, i;
  for (h = 0; h < HEADS; ++h)
    for (i = 0; i < tokens * DIM; ++i) fresh[h][i] = i % DIM == 0 ? (float)(first + i / DIM) : number();
  check_cuda(cudaMemcpy2DAsync((float*)rows->data + length * DIM, sizeof(float) * CAPACITY * DIM, fresh,
                               sizeof fresh[0], sizeof(float) * (size_t)(tokens * DIM), HEADS, cudaMemcpyHostToDevice,
                               stream));
}

int main(void) {
  const double inv_freq[DIM / 2] = {1.0, 0.1, 0.01, 0.001};
  const int64_t id = 7;
  const kvkeep_model model = {sizeof model, LAYERS,   QUERY_HEADS, HEADS, DIM,  DIM,  KVKEEP_ROPE_HALF,
                              DIM / 2,      inv_freq, 0,           0,     NULL, NULL, 0};
  int64_t query_shape[3] = {PROMPT, QUERY_HEADS, DIM}, cache_shape[4] = {1, HEADS, CAPACITY, DIM};
  static float asked[PROMPT * QUERY_HEADS * DIM], held[HEADS][CAPACITY][DIM];
  kvkeep_tensor keys[LAYERS], values[LAYERS], queries;
  kvkeep_layer_cache layers[LAYERS];
  kvkeep_provided provided;
  kvkeep_accelerator* gpu = NULL;
  kvkeep_keeper* keeper = NULL;
  cudaStream_t stream = NULL;
  int32_t length = 0, token = 0, l, h, i;
  int64_t events = 0;
  int gpus = 0;

  if (cudaGetDeviceCount(&gpus) != cudaSuccess || gpus == 0) {
    if (kvkeep_cuda_accelerator_make(0, &gpu) == KVKEEP_DEVICE_ERROR) fprintf(stderr, "%s\n", kvkeep_last_error());
    return gpu == NULL ? 77 : 1;
  }
  check_cuda(cudaSetDevice(0));
  check_cuda(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  memset(&provided, 0, sizeof provided);

  /* ---- as docs/reference/c.md shows it */
  check(kvkeep_cuda_accelerator_make(0, &gpu)); /* of GPU 0, for one keeper */
  check(kvkeep_cuda_use_stream(gpu, stream));   /* where its kernels run: the engine's own stream */
  provided.size = sizeof provided;
  provided.queries = 1;
  provided.accelerator = gpu;
  check(kvkeep_keeper_make(&model, "ams-tova,budget=40,interval=16", &provided, &keeper));
  /* ---- */

  check(kvkeep_join(keeper, id, 0, PROMPT));
  memset(layers, 0, sizeof layers);
  for (l = 0; l < LAYERS; ++l) {
    keys[l] = f32(4, cache_shape);
    values[l] = f32(4, cache_shape);
    layers[l].form = KVKEEP_DENSE;
    layers[l].keys = &keys[l];
    layers[l].values = &values[l];
  }
  check(kvkeep_bind(keeper, layers));
  queries = f32(3, query_shape);

  while (token < PROMPT + TOKENS) {
    const int32_t fed = token == 0 ? PROMPT : 1;
    const int32_t indptr[2] = {0, fed};
    kvkeep_cache cache;
    kvkeep_report report;
    for (l = 0; l < LAYERS; ++l) {
      kvkeep_observation seen;
      write_rows(&keys[l], length, fed, token, stream);
      write_rows(&values[l], length, fed, token, stream);
      for (i = 0; i < fed * QUERY_HEADS * DIM; ++i) asked[i] = number();
      query_shape[0] = fed;
      check_cuda(cudaMemcpyAsync(queries.data, asked, sizeof(float) * (size_t)(fed * QUERY_HEADS * DIM),
                                 cudaMemcpyHostToDevice, stream));
      memset(&seen, 0, sizeof seen);
      seen.size = sizeof seen;
      seen.layer = l;
      seen.num_sequences = 1;
      seen.sequences = &id;
      seen.indptr = indptr;
      seen.queries = &queries;
      check(kvkeep_observe(keeper, &seen));
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
    check(kvkeep_step(keeper, &cache, &report)); /* `length` is what is left; the rows move on the stream */
    events += report.num_cuts;
  }

  for (l = 0; l < LAYERS; ++l) {
    check_cuda(cudaMemcpyAsync(held, values[l].data, sizeof held, cudaMemcpyDeviceToHost, stream));
    check_cuda(cudaStreamSynchronize(stream));
    for (h = 0; h < HEADS; ++h) {
      const int32_t* positions = NULL;
      int64_t count = 0;
      check(kvkeep_positions(keeper, id, l, h, &positions, &count));
      if (count != length) fprintf(stderr, "%d slots, %d positions\n", (int)length, (int)count), exit(1);
      for (i = 0; i < length; ++i)
        if (held[h][i][0] != (float)positions[i])
          fprintf(stderr, "slot %d is token %g, not %d\n", (int)i, held[h][i][0], (int)positions[i]), exit(1);
    }
  }
  kvkeep_keeper_free(keeper);
  kvkeep_accelerator_free(gpu);
  for (l = 0; l < LAYERS; ++l) cudaFree(keys[l].data), cudaFree(values[l].data);
  cudaFree(queries.data);
  cudaStreamDestroy(stream); /* after the keeper, whose memory was used on it */
  printf("%d events, %d slots left\n", (int)events, (int)length);
  return events >= 5 && length <= 56 ? 0 : 1;
}
