// Captured graphs. A capture takes whatever is put on any stream, in the order in which the host puts it there: kernels
// and torch's own operators as nodes of Python's, which listens to launches, copies and fills as nodes of C's.
#pragma once
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef enum { OF_PYTHON, COPY, FILL, WRITE_32 } Kind;

typedef struct {
  Kind kind;
  void *to;
  const void *from;
  size_t bytes;
  int value;
} Node;

typedef struct {
  Node *nodes;
  int num_nodes, room;
} Graph;

#ifdef HAS_GRAPHS
// The graph that is being captured, if any.
static Graph *capture;
// Runs a node of Python's by its number: 0 if that succeeded.
static int (*run_node)(int number);

static void add_node(Node node) {
  if (capture->num_nodes == capture->room) {
    capture->room = capture->room ? 2 * capture->room : 64;
    capture->nodes = realloc(capture->nodes, capture->room * sizeof node);
  }
  capture->nodes[capture->num_nodes++] = node;
}

static int run(const Node *node) {
  switch (node->kind) {
    case OF_PYTHON: return run_node(node->value);
    case COPY: memmove(node->to, node->from, node->bytes); break;
    case FILL: memset(node->to, node->value, node->bytes); break;
    case WRITE_32: __atomic_store_n((uint32_t *)node->to, node->value, __ATOMIC_RELEASE); break;
  }
  return 0;
}

// Puts something on a stream: it is done at once, or captured.
int stub_put(Node node) {
  if (!capture) return run(&node);
  add_node(node);
  return 0;
}

int stub_is_capturing(void) { return capture != NULL; }
void stub_on_node(int (*callback)(int)) { run_node = callback; }
void stub_add_node(int number) { add_node((Node){OF_PYTHON, .value = number}); }

int stub_begin_capture(void) {
  if (capture) return 1;
  capture = calloc(1, sizeof *capture);
  return 0;
}

Graph *stub_end_capture(void) {
  Graph *made = capture;
  capture = NULL;
  return made;
}

int stub_replay(const Graph *graph) {
  int failed = 0;
  for (int i = 0; i < graph->num_nodes && !failed; i++) failed = run(graph->nodes + i);
  return failed;
}
#endif
