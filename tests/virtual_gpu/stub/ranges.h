// Which memory the stub has given out, by address.
#pragma once
#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

typedef struct {
  uintptr_t begin;
  size_t bytes;
  int kind;
} Range;

enum { MOST_RANGES = 1 << 16 };
static Range ranges[MOST_RANGES];
static int num_ranges;
static pthread_mutex_t ranges_lock = PTHREAD_MUTEX_INITIALIZER;

// Returns 0 when there is no room.
static int ranges_add(uintptr_t begin, size_t bytes, int kind) {
  pthread_mutex_lock(&ranges_lock);
  int room = num_ranges < MOST_RANGES;
  if (room) ranges[num_ranges++] = (Range){begin, bytes, kind};
  pthread_mutex_unlock(&ranges_lock);
  return room;
}

// Returns the range that holds an address; one of no bytes if none does.
static Range ranges_find(uintptr_t address) {
  Range found = {0, 0, 0};
  pthread_mutex_lock(&ranges_lock);
  for (int i = num_ranges; i-- > 0 && !found.bytes;)
    if (address - ranges[i].begin < ranges[i].bytes) found = ranges[i];
  pthread_mutex_unlock(&ranges_lock);
  return found;
}

// Removes the range that begins at an address and returns its bytes, 0 if there is none.
static size_t ranges_remove(uintptr_t begin) {
  size_t bytes = 0;
  pthread_mutex_lock(&ranges_lock);
  for (int i = num_ranges; i-- > 0 && !bytes;)
    if (ranges[i].begin == begin) {
      bytes = ranges[i].bytes;
      ranges[i] = ranges[--num_ranges];
    }
  pthread_mutex_unlock(&ranges_lock);
  return bytes;
}
