/* A libnvidia-ml.so.1 for machines without a GPU: as much of NVML as the launcher asks.
 *
 *   cc -shared -fPIC -o FOLDER/libnvidia-ml.so.1 fake_nvml.c      then run with LD_LIBRARY_PATH=FOLDER and
 *
 *   FAKE_GPUS=N        N cards, 0 by default; card I is GPU-000000HH-0000-4000-8000-000000000000 (HH: I in hex)
 *   FAKE_LOST=I,J      these cards fell off the bus
 *   FAKE_MIG=I:S,...   card I is cut into S slices, in every other place of seven;
 *                      slice S of it is MIG-000000HH-000S-4000-8000-000000000000, GPU instance S + 1
 *   FAKE_T4=I,J        these are NVIDIA T4, the others NVIDIA H200; card I is at the PCI address 0000:HH:00.0, HH: I + 1
 *   FAKE_FAILS=init    there is no driver behind the library; `mismatch`: another version of it is loaded;
 *                      `count`: the driver cannot count its cards
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { OK = 0, INVALID = 2, UNSUPPORTED = 3, NOT_FOUND = 6, NO_DRIVER = 9, LOST = 15, MISMATCH = 18, UNKNOWN = 999 };
enum { CARDS = 64, PLACES = 7 };

struct device {
  int card;
  int slice; /* -1: the card itself */
};

static struct device cards[CARDS], slices[CARDS][PLACES];

static const char *setting(const char *name) {
  const char *value = getenv(name);
  return value ? value : "";
}

/* Find `card` in a list such as `1:4,3:2`; return what stands behind the colon, 1 without one, 0 if it is not there. */
static int listed(const char *name, int card) {
  const char *at = setting(name);
  while (*at) {
    char *end;
    long number = strtol(at, &end, 10), value = 1;
    if (end == at)
      return 0;
    if (*end == ':')
      value = strtol(end + 1, &end, 10);
    if (number == card)
      return (int)value;
    at = *end == ',' ? end + 1 : end;
  }
  return 0;
}

int nvmlInitWithFlags(unsigned flags) {
  (void)flags;
  for (int card = 0; card < CARDS; card++) {
    cards[card] = (struct device){card, -1};
    for (int place = 0; place < PLACES; place++)
      slices[card][place] = (struct device){card, place / 2};
  }
  const char *fails = setting("FAKE_FAILS");
  return !strcmp(fails, "init") ? NO_DRIVER : !strcmp(fails, "mismatch") ? MISMATCH : OK;
}

int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }

int nvmlShutdown(void) { return OK; }

const char *nvmlErrorString(int error) {
  return error == LOST       ? "GPU is lost"
         : error == MISMATCH ? "Driver/library version mismatch"
         : error == UNKNOWN  ? "Unknown Error"
                             : "an error of the fake";
}

int nvmlDeviceGetCount_v2(unsigned *count) {
  *count = (unsigned)atoi(setting("FAKE_GPUS"));
  return strcmp(setting("FAKE_FAILS"), "count") ? OK : UNKNOWN;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, struct device **device) {
  if (index >= CARDS || (int)index >= atoi(setting("FAKE_GPUS")))
    return INVALID;
  *device = &cards[index];
  return listed("FAKE_LOST", (int)index) ? LOST : OK;
}

int nvmlDeviceGetUUID(struct device *device, char *text, unsigned size) {
  int slice = device->slice < 0 ? 0 : device->slice;
  snprintf(text, size, "%s-%08x-%04x-4000-8000-000000000000", device->slice < 0 ? "GPU" : "MIG", device->card, slice);
  return OK;
}

int nvmlDeviceGetMigMode(struct device *device, unsigned *current, unsigned *pending) {
  *current = *pending = listed("FAKE_MIG", device->card) > 0;
  return *setting("FAKE_MIG") ? OK : UNSUPPORTED;
}

int nvmlDeviceGetMaxMigDeviceCount(struct device *device, unsigned *count) {
  (void)device;
  *count = PLACES;
  return OK;
}

int nvmlDeviceGetMigDeviceHandleByIndex(struct device *device, unsigned place, struct device **slice) {
  if (place % 2 || (int)place / 2 >= listed("FAKE_MIG", device->card))
    return NOT_FOUND;
  *slice = &slices[device->card][place];
  return OK;
}

int nvmlDeviceGetGpuInstanceId(struct device *device, unsigned *id) {
  *id = (unsigned)device->slice + 1;
  return OK;
}

int nvmlDeviceGetComputeInstanceId(struct device *device, unsigned *id) {
  (void)device;
  *id = 0;
  return OK;
}

int nvmlDeviceGetName(struct device *device, char *text, unsigned size) {
  snprintf(text, size, listed("FAKE_T4", device->card) ? "NVIDIA T4" : "NVIDIA H200");
  return OK;
}

struct pci {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char bus_id[32];
};

int nvmlDeviceGetPciInfo_v3(struct device *device, struct pci *found) {
  memset(found, 0, sizeof *found);
  snprintf(found->bus_id, sizeof found->bus_id, "00000000:%02X:00.0", device->card + 1);
  return OK;
}
