// Reading tar: ustar, pax (with global headers), GNU long names and links, base-256 numbers, v7, and sparse files in the old GNU form and
// the three pax forms. The archive is hostile: every number is checked before it is used, every length is bounded, and what is not
// understood is refused by name.
#include "tar.h"
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define NUMBER_MAX (UINT64_MAX >> 2)   // sizes and offsets stay clear of overflow when two are added

static int bad(struct tar *t, const char *format, ...) __attribute__((format(printf, 2, 3)));
static int bad(struct tar *t, const char *format, ...) {
  char what[160];
  va_list list;
  va_start(list, format);
  vsnprintf(what, sizeof what, format, list);
  va_end(list);
  if (t->entry.name) snprintf(t->error, sizeof t->error, "archive entry %.200s: %s", t->entry.name, what);
  else snprintf(t->error, sizeof t->error, "archive: %s", what);
  return -1;
}

// source ----------------------------------------------------------------------------------------------------------------------------

static int take(struct tar *t, void *to, uint64_t n) {           // to NULL: skip. 1, 0 at a clean end before the first byte, -1
  uint8_t *out = to;
  for (uint64_t done = 0; done < n;) {
    const uint8_t *p;
    size_t have;
    int r = t->peek(t->arg, &p, &have);
    if (r < 0) { t->error[0] = 0; return -1; }
    if (!r) return done ? bad(t, "the archive is cut off") : 0;
    if (have > n - done) have = (size_t)(n - done);
    if (out) memcpy(out + done, p, have);
    t->eat(t->arg, have);
    done += have;
  }
  return 1;
}

static int must(struct tar *t, void *to, uint64_t n) {
  int r = n ? take(t, to, n) : 1;
  return r == 1 ? 0 : r ? -1 : bad(t, "the archive is cut off");
}

// numbers ---------------------------------------------------------------------------------------------------------------------------

// Octal with spaces and NULs around it, or GNU's base-256. -1 when it is neither or out of range. Negative: only times may be.
static int number(const char *field, size_t n, int64_t *v) {
  const uint8_t *p = (const uint8_t *)field;
  if (p[0] & 0x80) {
    int64_t x = p[0] & 0x40 ? -1 : 0;
    x = (int64_t)((uint64_t)x << 6 | (p[0] & 0x3f));
    for (size_t i = 1; i < n; i++) {
      if (x > INT64_MAX >> 8 || x < INT64_MIN >> 8) return -1;
      x = (int64_t)((uint64_t)x << 8 | p[i]);
    }
    *v = x;
    return 0;
  }
  uint64_t x = 0;
  size_t i = 0;
  while (i < n && (p[i] == ' ' || p[i] == 0)) i++;
  for (; i < n && p[i] >= '0' && p[i] <= '7'; i++) {
    if (x > NUMBER_MAX >> 3) return -1;
    x = x << 3 | (uint64_t)(p[i] - '0');
  }
  for (; i < n; i++)
    if (p[i] != ' ' && p[i] != 0) return -1;
  *v = (int64_t)x;
  return 0;
}

static int size_of(const char *field, size_t n, uint64_t *v) {
  int64_t x;
  if (number(field, n, &x) || x < 0 || (uint64_t)x > NUMBER_MAX) return -1;
  *v = (uint64_t)x;
  return 0;
}

static int decimal(const uint8_t *p, size_t n, uint64_t *v) {
  uint64_t x = 0;
  if (!n) return -1;
  for (size_t i = 0; i < n; i++) {
    if (p[i] < '0' || p[i] > '9' || x > NUMBER_MAX / 10) return -1;
    x = x * 10 + (uint64_t)(p[i] - '0');
  }
  *v = x;
  return x > NUMBER_MAX ? -1 : 0;
}

static int moment(const uint8_t *p, size_t n, int64_t *sec, uint32_t *nsec) {
  int minus = n && *p == '-';
  const uint8_t *dot = memchr(p, '.', n);
  uint64_t s;
  uint32_t f = 0, unit = 100000000;
  if (decimal(p + minus, (dot ? (size_t)(dot - p) : n) - (size_t)minus, &s)) return -1;
  if (dot)
    for (const uint8_t *d = dot + 1; d < p + n; d++, unit /= 10) {
      if (*d < '0' || *d > '9') return -1;
      f += (uint32_t)(*d - '0') * unit;
    }
  *sec = minus ? -(int64_t)s : (int64_t)s;
  if (minus && f) { *sec -= 1; f = 1000000000 - f; }
  *nsec = f;
  return 0;
}

// pax records -----------------------------------------------------------------------------------------------------------------------

struct pax { const uint8_t *key, *value; size_t nkey, nvalue; };

// "length key=value\n" at `at`; -1 when malformed, 0 at the end.
static int pax_next(const struct blob *b, size_t *at, struct pax *x) {
  if (*at == b->n) return 0;
  const uint8_t *p = b->p + *at;
  size_t left = b->n - *at, digits = 0;
  uint64_t size;
  while (digits < left && digits < 9 && p[digits] >= '0' && p[digits] <= '9') digits++;
  if (digits == left || p[digits] != ' ' || decimal(p, digits, &size) || size > left || size < digits + 3 || p[size - 1] != '\n') return -1;
  x->key = p + digits + 1;
  const uint8_t *equals = memchr(x->key, '=', (size_t)(p + size - 1 - x->key));
  if (!equals || equals == x->key) return -1;
  x->nkey = (size_t)(equals - x->key);
  x->value = equals + 1;
  x->nvalue = (size_t)(p + size - 1 - x->value);
  *at += (size_t)size;
  return 1;
}

static int is(const struct pax *x, const char *key) { return x->nkey == strlen(key) && !memcmp(x->key, key, x->nkey); }

static int keep(struct tar *t, struct blob *b, const void *p, size_t n) {        // a text of its own, NUL-terminated
  if (memchr(p, 0, n)) return bad(t, "a name with a NUL byte");
  if (b == &t->name) t->entry.name = NULL;                       // it moves
  b->n = 0;
  if (blob_add(b, p, n) || blob_add(b, "", 1)) return bad(t, "no memory for a name");
  if (b == &t->name) t->entry.name = (const char *)b->p;
  return 0;
}

static int add_segment(struct tar *t, uint64_t offset, uint64_t size) {
  if (t->nmap == TAR_SEGMENTS_MAX) return bad(t, "more than %d pieces in a sparse file", TAR_SEGMENTS_MAX);
  if (t->nmap == t->cap) {
    size_t cap = t->cap ? t->cap * 2 : 64;
    struct segment *more = realloc(t->map, cap * sizeof *more);
    if (!more) return bad(t, "no memory for its sparse map");
    t->map = more;
    t->cap = cap;
  }
  t->map[t->nmap++] = (struct segment){offset, size};
  return 0;
}

struct sparse { uint64_t real, offset, major, minor; int has_real, has_major, has_minor, has_map, name; };

static int pax_sparse(struct tar *t, const struct pax *x, struct sparse *s) {
  uint64_t v = 0;
  if (is(x, "GNU.sparse.name")) { s->name = 1; return keep(t, &t->name, x->value, x->nvalue); }
  if (is(x, "GNU.sparse.map")) {
    t->nmap = 0;
    s->has_map = 1;
    uint64_t offset = 0;
    int second = 0;
    for (const uint8_t *p = x->value, *end = p + x->nvalue; p < end; second = !second) {
      const uint8_t *comma = memchr(p, ',', (size_t)(end - p));
      if (!comma) comma = end;
      if (decimal(p, (size_t)(comma - p), &v)) return bad(t, "a malformed sparse map");
      if (!second) offset = v;
      else if (add_segment(t, offset, v)) return -1;
      p = comma + 1;
    }
    return second ? bad(t, "a sparse map with an odd count") : 0;
  }
  if (decimal(x->value, x->nvalue, &v)) return bad(t, "a malformed number in %.*s", (int)(x->nkey < 40 ? x->nkey : 40), (const char *)x->key);
  if (is(x, "GNU.sparse.major")) { s->major = v; s->has_major = 1; }
  else if (is(x, "GNU.sparse.minor")) { s->minor = v; s->has_minor = 1; }
  else if (is(x, "GNU.sparse.size") || is(x, "GNU.sparse.realsize")) { s->real = v; s->has_real = 1; }
  else if (is(x, "GNU.sparse.offset")) s->offset = v;
  else if (is(x, "GNU.sparse.numbytes")) { s->has_map = 1; return add_segment(t, s->offset, v); }
  else if (!is(x, "GNU.sparse.numblocks")) return bad(t, "an unknown sparse format");
  return 0;
}

static int apply_pax(struct tar *t, const struct blob *b, struct sparse *s) {
  struct tar_entry *e = &t->entry;
  struct pax x;
  size_t at = 0;
  int r;
  while ((r = pax_next(b, &at, &x)) > 0) {
    uint64_t v = 0;
    if (is(&x, "path")) {
      if (x.nvalue && !s->name && keep(t, &t->name, x.value, x.nvalue)) return -1;
    } else if (is(&x, "linkpath")) {
      if (x.nvalue && keep(t, &t->link, x.value, x.nvalue)) return -1;
    } else if (is(&x, "size")) {
      if (decimal(x.value, x.nvalue, &e->size)) return bad(t, "a malformed size");
    } else if (is(&x, "uid") || is(&x, "gid")) {
      if (decimal(x.value, x.nvalue, &v) || v >= UINT32_MAX) return bad(t, "a malformed owner");
      *(x.key[0] == 'u' ? &e->uid : &e->gid) = (uint32_t)v;
    } else if (is(&x, "mtime")) {
      if (moment(x.value, x.nvalue, &e->mtime, &e->nsec)) return bad(t, "a malformed time");
    } else if (x.nkey > 11 && !memcmp(x.key, "GNU.sparse.", 11)) {
      if (pax_sparse(t, &x, s)) return -1;
    }
  }
  return r ? bad(t, "a malformed extended header") : 0;
}

int tar_xattr(struct tar *t, char name[256], const uint8_t **value, size_t *size) {
  static const char prefix[] = "SCHILY.xattr.user.";
  struct pax x;
  while (pax_next(&t->local, &t->attributes, &x) > 0) {
    if (x.nkey < sizeof prefix || memcmp(x.key, prefix, sizeof prefix - 1) || x.nkey - 13 > 255 || memchr(x.key, 0, x.nkey)) continue;
    memcpy(name, x.key + 13, x.nkey - 13);
    name[x.nkey - 13] = 0;
    *value = x.value;
    *size = x.nvalue;
    return 1;
  }
  return 0;
}

// sparse maps in the data -----------------------------------------------------------------------------------------------------------

static int old_gnu_map(struct tar *t, const struct ustar *h) {
  const char *p = (const char *)h + 386;
  uint8_t block[TAR_BLOCK];
  int count = 4, more = ((const char *)h)[482];
  uint64_t offset, size;
  if (size_of((const char *)h + 483, 12, &t->entry.size)) return bad(t, "a malformed sparse size");
  for (;;) {
    for (int i = 0; i < count && p[i * 24]; i++) {
      if (size_of(p + i * 24, 12, &offset) || size_of(p + i * 24 + 12, 12, &size)) return bad(t, "a malformed sparse map");
      if (add_segment(t, offset, size)) return -1;
    }
    if (!more) return 0;
    if (must(t, block, sizeof block)) return -1;
    p = (const char *)block;
    count = 21;
    more = block[504];
  }
}

// GNU.sparse 1.0: decimal lines at the start of the data, padded to a block.
static int map_line(struct tar *t, uint8_t block[TAR_BLOCK], size_t *at, uint64_t *v) {
  uint8_t digits[24];
  for (size_t n = 0; n < sizeof digits;) {
    if (*at == TAR_BLOCK) {
      if (t->left < TAR_BLOCK) return bad(t, "a sparse map that is cut off");
      if (must(t, block, TAR_BLOCK)) return -1;
      t->left -= TAR_BLOCK;
      *at = 0;
    }
    uint8_t c = block[(*at)++];
    if (c != '\n') { digits[n++] = c; continue; }
    return decimal(digits, n, v) ? bad(t, "a malformed sparse map") : 0;
  }
  return bad(t, "a malformed sparse map");
}

static int pax_map(struct tar *t) {
  uint8_t block[TAR_BLOCK];
  size_t at = TAR_BLOCK;
  uint64_t count, offset, size;
  t->nmap = 0;
  if (map_line(t, block, &at, &count)) return -1;
  if (count > TAR_SEGMENTS_MAX) return bad(t, "more than %d pieces in a sparse file", TAR_SEGMENTS_MAX);
  while (count--)
    if (map_line(t, block, &at, &offset) || map_line(t, block, &at, &size) || add_segment(t, offset, size)) return -1;
  return 0;
}

static int check_map(struct tar *t) {
  uint64_t end = 0, sum = 0;
  for (size_t i = 0; i < t->nmap; i++) {
    if (t->map[i].offset < end || t->map[i].offset + t->map[i].size > t->entry.size) return bad(t, "a sparse map that overlaps or leaves the file");
    end = t->map[i].offset + t->map[i].size;
    sum += t->map[i].size;
  }
  return sum == t->left ? 0 : bad(t, "a sparse map of %llu bytes with %llu of data", (unsigned long long)sum, (unsigned long long)t->left);
}

// entries ---------------------------------------------------------------------------------------------------------------------------

static int sum_ok(const struct ustar *h) {
  const uint8_t *p = (const uint8_t *)h;
  int64_t want, plain = 0, sign = 0;
  if (number(h->sum, sizeof h->sum, &want)) return 0;
  for (size_t i = 0; i < TAR_BLOCK; i++) {
    uint8_t c = i >= 148 && i < 156 ? ' ' : p[i];
    plain += c;
    sign += (int8_t)c;                 // what some old programs summed
  }
  return want == plain || want == sign;
}

static int is_zero(const struct ustar *h) {
  const uint8_t *p = (const uint8_t *)h;
  for (size_t i = 0; i < TAR_BLOCK; i++)
    if (p[i]) return 0;
  return 1;
}

static size_t length(const char *s, size_t max) {
  const char *end = memchr(s, 0, max);
  return end ? (size_t)(end - s) : max;
}

static int extended(struct tar *t, const struct ustar *h, struct blob *to, int append, const char *what) {
  uint64_t size;
  if (size_of(h->size, sizeof h->size, &size)) return bad(t, "%s with a malformed size", what);
  if (!append) to->n = 0;
  if (size > TAR_EXTENDED_MAX || to->n > TAR_EXTENDED_MAX - size) return bad(t, "%s of more than %u bytes", what, TAR_EXTENDED_MAX);
  uint8_t block[TAR_BLOCK];
  while (size) {
    if (must(t, block, TAR_BLOCK)) return -1;
    size_t n = size < TAR_BLOCK ? (size_t)size : TAR_BLOCK;
    if (blob_add(to, block, n)) return bad(t, "no memory for %s", what);
    size -= n;
  }
  return 0;
}

static int basic(struct tar *t, const struct ustar *h, int long_name, int long_link) {
  struct tar_entry *e = &t->entry;
  int64_t mode, uid, gid, mtime, major = 0, minor = 0;
  int posix = !memcmp(h->magic, "ustar", 6);
  if (!long_name) {
    char full[sizeof h->prefix + sizeof h->name + 1];
    size_t n = posix ? length(h->prefix, sizeof h->prefix) : 0;
    memcpy(full, h->prefix, n);
    if (n) full[n++] = '/';
    size_t m = length(h->name, sizeof h->name);
    memcpy(full + n, h->name, m);
    if (keep(t, &t->name, full, n + m)) return -1;
  }
  if (!long_link && keep(t, &t->link, h->link, length(h->link, sizeof h->link))) return -1;
  e->name = (const char *)t->name.p;                             // errors from here on can name it
  if (number(h->mode, 8, &mode) || number(h->uid, 8, &uid) || number(h->gid, 8, &gid) || number(h->mtime, 12, &mtime) || size_of(h->size, 12, &e->size))
    return bad(t, "a malformed number in its header");
  if (uid < 0 || gid < 0 || uid >= UINT32_MAX || gid >= UINT32_MAX) return bad(t, "an owner out of range");
  if ((h->type == '3' || h->type == '4') && (number(h->major, 8, &major) || number(h->minor, 8, &minor))) return bad(t, "a malformed device number");
  e->mode = (uint32_t)mode & 07777;
  e->uid = (uint32_t)uid;
  e->gid = (uint32_t)gid;
  e->major = (uint32_t)major;
  e->minor = (uint32_t)minor;
  e->mtime = mtime;
  e->nsec = 0;
  e->type = h->type && h->type != '7' && h->type != 'S' ? h->type : '0';
  return 0;
}

static int finish(struct tar *t, const struct ustar *h) {
  struct tar_entry *e = &t->entry;
  struct sparse s = {0};
  t->nmap = t->at = 0;
  t->into = 0;
  t->attributes = 0;
  if (apply_pax(t, &t->global, &s) || apply_pax(t, &t->local, &s)) return -1;
  e->name = (const char *)t->name.p;
  e->link = (const char *)t->link.p;
  if (!*e->name) return bad(t, "an entry without a name");
  if (!strchr("0123456", e->type)) return bad(t, "type '%c' (0x%02x) is not supported", e->type > ' ' && e->type < 127 ? e->type : '?', (uint8_t)e->type);
  uint64_t stored = e->type == '0' ? e->size : 0;                // links, directories and devices have no data whatever their size says
  size_t n = strlen(e->name);
  if (e->type == '0' && e->name[n - 1] == '/') e->type = '5';    // how v7 said "directory"
  t->left = stored;
  t->pad = (TAR_BLOCK - stored % TAR_BLOCK) % TAR_BLOCK;
  t->sparse = 0;
  if (e->type != '0') return 1;
  if (h->type == 'S') {
    t->sparse = 1;
    if (old_gnu_map(t, h)) return -1;
  } else if (s.has_map || s.has_major) {
    t->sparse = 1;
    if (!s.has_real) return bad(t, "a sparse file without its size");
    e->size = s.real;
    if (s.has_major && (s.major > 1 || s.minor > 1 || (s.major == 1 && s.minor))) return bad(t, "sparse format %llu.%llu is not supported", (unsigned long long)s.major, (unsigned long long)s.minor);
    if (s.has_major && s.major == 1 && pax_map(t)) return -1;
  }
  if (t->sparse && check_map(t)) return -1;
  return 1;
}

int tar_next(struct tar *t) {
  struct ustar h;
  if (must(t, NULL, t->left) || must(t, NULL, t->pad)) return -1;
  t->left = t->pad = 0;
  t->entry.name = t->entry.link = NULL;
  t->local.n = 0;
  int long_name = 0, long_link = 0, pending = 0;
  for (int headers = 0;; headers++) {
    int r = take(t, &h, sizeof h);
    if (r < 0) return -1;
    if (!r) return bad(t, "it ends without the end-of-archive mark: it is cut off");
    if (is_zero(&h)) return pending ? bad(t, "an extended header without its entry") : 0;
    if (!sum_ok(&h)) return bad(t, "a damaged header, or not a tar archive");
    if (headers > 64) return bad(t, "too many extended headers before an entry");
    switch (h.type) {
      case 'x': case 'X':
        if (extended(t, &h, &t->local, 1, "an extended header")) return -1;
        pending = 1;
        continue;
      case 'g':
        if (extended(t, &h, &t->global, 1, "the global headers")) return -1;
        continue;                      // one may stand alone at the end
      case 'L': case 'K': {
        struct blob *to = h.type == 'L' ? &t->name : &t->link;
        if (extended(t, &h, to, 0, "a long name")) return -1;
        to->n = to->p ? length((const char *)to->p, to->n) : 0;
        if (blob_add(to, "", 1)) return bad(t, "no memory for a long name");
        *(h.type == 'L' ? &long_name : &long_link) = 1;
        pending = 1;
        continue;
      }
      case 'V': {                      // a volume label has nothing to extract
        uint64_t size;
        if (size_of(h.size, sizeof h.size, &size) || must(t, NULL, (size + TAR_BLOCK - 1) / TAR_BLOCK * TAR_BLOCK)) return bad(t, "a malformed volume label");
        continue;
      }
    }
    if (basic(t, &h, long_name, long_link)) return -1;
    return finish(t, &h);
  }
}

int tar_data(struct tar *t, const uint8_t **p, size_t *n, uint64_t *offset) {
  while (t->sparse && t->at < t->nmap && t->into == t->map[t->at].size) { t->at++; t->into = 0; }
  if (!t->left) return 0;
  int r = t->peek(t->arg, p, n);
  if (r < 0) { t->error[0] = 0; return -1; }
  if (!r) return bad(t, "the archive is cut off");
  uint64_t most = t->left;
  *offset = t->into;
  if (t->sparse) {
    *offset += t->map[t->at].offset;
    if (most > t->map[t->at].size - t->into) most = t->map[t->at].size - t->into;
  }
  if (*n > most) *n = (size_t)most;
  return 1;
}

void tar_eat(struct tar *t, size_t n) {
  t->eat(t->arg, n);
  t->left -= n;
  t->into += n;
}

void tar_free(struct tar *t) {
  free(t->map);
  free(t->name.p);
  free(t->link.p);
  free(t->global.p);
  free(t->local.p);
}
