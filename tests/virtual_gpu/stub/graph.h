// Streams, events and captured graphs. What is put on a stream is done at once, unless the stream is captured: kernels and
// torch's own operators as nodes of Python's, which listens to launches, copies and fills as nodes of C's.
//
// A graph keeps the order of its nodes that streams and events gave, and no more: a replay takes any node that is ready.
// Every second replay is late: it runs when its stream, or an event that it records, is waited for, or when more is put
// on its stream. Devices, and so ranks, choose differently.
#pragma once
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

typedef enum { OF_PYTHON, COPY, FILL, WRITE_32, WAIT, RECORD } Kind;

typedef struct {
  Kind kind;
  // Of WAIT and RECORD: `to` is the event.
  void *to;
  const void *from;
  size_t bytes;
  int value;
} Node;

// Indices of nodes.
typedef struct {
  int *of, count, room;
} Set;

typedef struct Graph {
  Node *nodes;
  // What each node follows; whether a direct call made the node.
  Set *follows;
  char *direct;
  int num_nodes, room;
  unsigned long long number;
  void *origin;
  int is_ended;
} Graph;

#ifdef HAS_GRAPHS
int *stub_current_device(void);

// A stream or an event by its handle: the capture that it is in, and the nodes before it.
typedef struct Place {
  void *handle;
  Graph *graph;
  Set nodes;
  // Of an event: the launch that records it, or that was on its stream when it was recorded; 0 for none.
  unsigned long long launch;
  int is_recorded;
  struct Place *next;
} Place;

static Place *streams, *events;
static unsigned long long num_captures, num_launches;

// Launches of graphs, in their order. None is freed, as other threads may ask for them.
typedef struct Launch {
  Graph *graph;
  void *stream;
  unsigned long long number;
  int has_run;
  struct Launch *next;
} Launch;

// From the first that has not run.
static Launch *late;
static pthread_mutex_t places_lock = PTHREAD_MUTEX_INITIALIZER;

// Runs a node of Python's by its number: 0 if that succeeded.
static int (*run_node)(int number);
void stub_on_node(int (*callback)(int)) { run_node = callback; }

static Place *place(Place **all, void *handle) {
  pthread_mutex_lock(&places_lock);
  Place *found = *all;
  while (found && found->handle != handle) found = found->next;
  if (!found) {
    found = calloc(1, sizeof *found);
    found->handle = handle;
    found->next = *all;
    *all = found;
  }
  pthread_mutex_unlock(&places_lock);
  return found;
}

static int has(const Set *set, int node) {
  for (int i = 0; i < set->count; i++)
    if (set->of[i] == node) return 1;
  return 0;
}

static void put_in(Set *set, int node) {
  if (has(set, node)) return;
  if (set->count == set->room) {
    set->room = set->room ? 2 * set->room : 4;
    set->of = realloc(set->of, set->room * sizeof(int));
  }
  set->of[set->count++] = node;
}

static void put_all(Set *set, const Set *more) {
  for (int i = 0; i < more->count; i++) put_in(set, more->of[i]);
}

static int add_node(Graph *graph, Node node, const Set *follows) {
  if (graph->num_nodes == graph->room) {
    graph->room = graph->room ? 2 * graph->room : 64;
    graph->nodes = realloc(graph->nodes, graph->room * sizeof node);
    graph->follows = realloc(graph->follows, graph->room * sizeof(Set));
    graph->direct = realloc(graph->direct, graph->room);
  }
  int made = graph->num_nodes++;
  graph->nodes[made] = node;
  graph->follows[made] = (Set){0};
  graph->direct[made] = 0;
  put_all(graph->follows + made, follows);
  return made;
}

static int run(const Node *node) {
  switch (node->kind) {
    case OF_PYTHON: return run_node(node->value);
    case COPY: memmove(node->to, node->from, node->bytes); break;
    case FILL: memset(node->to, node->value, node->bytes); break;
    case WRITE_32: __atomic_store_n((uint32_t *)node->to, node->value, __ATOMIC_RELEASE); break;
    case WAIT: case RECORD: break;
  }
  return 0;
}

// A random number, another one on every device.
static unsigned choose(unsigned count) {
  static unsigned state;
  if (!state) state = 1 + *stub_current_device();
  return rand_r(&state) % count;
}

// Runs a graph in an order that its edges allow, another at every replay.
static int run_graph(const Graph *graph) {
  char *done = calloc(1, graph->num_nodes + 1);
  int *ready = malloc((graph->num_nodes + 1) * sizeof(int));
  int failed = 0;
  for (int left = graph->num_nodes; left && !failed; left--) {
    int num_ready = 0;
    for (int i = 0; i < graph->num_nodes; i++) {
      const Set *follows = graph->follows + i;
      int is_ready = !done[i];
      for (int j = 0; j < follows->count && is_ready; j++) is_ready = done[follows->of[j]];
      if (is_ready) ready[num_ready++] = i;
    }
    int chosen = num_ready ? ready[choose(num_ready)] : -1;
    failed = chosen < 0 || run(graph->nodes + chosen);
    if (chosen >= 0) done[chosen] = 1;
  }
  free(done);
  free(ready);
  return failed;
}

// Runs the launches on a stream up to the one with number `last`.
static int run_late(void *stream, unsigned long long last) {
  int failed = 0;
  for (Launch *l = late; l && l->number <= last; l = l->next)
    if (l->stream == stream && !l->has_run) {
      l->has_run = 1;
      failed |= run_graph(l->graph);
    }
  while (late && late->has_run) late = late->next;
  return failed;
}

int stub_synchronize(void *stream) { return run_late(stream, ~0ull); }

int stub_synchronize_all(void) {
  int failed = 0;
  while (late) failed |= run_late(late->stream, late->number);
  return failed;
}

static Launch *pending(const Place *event) {
  Launch *found = late;
  while (found && found->number != event->launch) found = found->next;
  return found && !found->has_run ? found : NULL;
}

int stub_is_pending(void *handle) { return pending(place(&events, handle)) != NULL; }

static int reach(const Place *event) {
  Launch *launch = pending(event);
  return launch ? run_late(launch->stream, launch->number) : 0;
}

static Graph *capture_of(void *stream) { return place(&streams, stream)->graph; }

// Puts something on a stream: it is done at once, or captured.
int stub_put(Node node, void *stream) {
  Place *p = place(&streams, stream);
  if (!p->graph) return stub_synchronize(stream) || run(&node);
  int made = add_node(p->graph, node, &p->nodes);
  p->nodes.count = 0;
  put_in(&p->nodes, made);
  return 0;
}

void stub_add_node(int number, void *stream) { stub_put((Node){OF_PYTHON, .value = number}, stream); }

// The number of a stream's capture, 0 for none.
unsigned long long stub_capture(void *stream) {
  Graph *graph = capture_of(stream);
  return graph ? graph->number : 0;
}

int stub_begin_capture(void *stream) {
  Place *p = place(&streams, stream);
  if (p->graph) return 1;
  p->graph = calloc(1, sizeof(Graph));
  p->graph->number = ++num_captures;
  p->graph->origin = stream;
  p->nodes.count = 0;
  return 0;
}

// Ends the capture that a stream began: NULL if a fork was not joined.
Graph *stub_end_capture(void *stream) {
  Place *origin = place(&streams, stream);
  Graph *graph = origin->graph;
  if (!graph || graph->origin != stream) return NULL;
  Set before = {0};
  put_all(&before, &origin->nodes);
  for (int i = 0; i < before.count; i++) put_all(&before, graph->follows + before.of[i]);
  graph->is_ended = 1;
  for (Place *p = streams; p; p = p->next)
    if (p->graph == graph) p->graph = NULL, p->nodes.count = 0;
  for (int i = 0; i < graph->num_nodes; i++)
    if (!graph->direct[i] && !has(&before, i)) return NULL;
  return graph;
}

int stub_record(void *handle, void *stream) {
  Place *event = place(&events, handle), *p = place(&streams, stream);
  event->graph = p->graph;
  event->is_recorded = 1;
  event->nodes.count = 0;
  put_all(&event->nodes, &p->nodes);
  event->launch = 0;
  for (Launch *l = late; l; l = l->next)
    if (l->stream == stream && !l->has_run) event->launch = l->number;
  return 0;
}

// Lets a stream wait for an event; an error where CUDA refuses that.
int stub_wait(void *stream, void *handle) {
  Place *event = place(&events, handle), *p = place(&streams, stream);
  if (!event->graph) return p->graph && event->is_recorded ? 1 : reach(event);
  if (event->graph->is_ended || (p->graph && p->graph != event->graph)) return 1;
  p->graph = event->graph;
  put_all(&p->nodes, &event->nodes);
  return 0;
}

int stub_reach(void *handle) { return reach(place(&events, handle)); }

void stub_forget(void *handle) {
  Place *event = place(&events, handle);
  event->graph = NULL;
  event->launch = event->is_recorded = event->nodes.count = 0;
}

// Launches a graph. What its wait nodes wait for is not late.
int stub_launch(Graph *graph, void *stream) {
  int failed = 0;
  for (int i = 0; i < graph->num_nodes; i++)
    if (graph->nodes[i].kind == WAIT) failed |= stub_reach(graph->nodes[i].to);
  Launch *made = calloc(1, sizeof *made), *at = late;
  *made = (Launch){graph, stream, ++num_launches};
  while (at && at->next) at = at->next;
  if (at) at->next = made;
  else late = made;
  for (int i = 0; i < graph->num_nodes; i++)
    if (graph->nodes[i].kind == RECORD) {
      Place *event = place(&events, graph->nodes[i].to);
      event->graph = NULL;
      event->is_recorded = 1;
      event->launch = made->number;
    }
  return failed || (choose(2) ? stub_synchronize(stream) : 0);
}
#endif
