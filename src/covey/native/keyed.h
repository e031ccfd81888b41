/* AES-GCM records by libcrypto, as covey/wire/seal.py describes them: what sealed and striped lanes are made of.
 *
 * If the libcrypto of Python's ssl module is much slower than the one in `cryptography` (older ones lack the instructions of
 * newer processors), a lane gets ciphers of the latter, and long records are sealed and opened by these, as a whole.
 */
#ifndef COVEY_KEYED_H
#define COVEY_KEYED_H

#include "native.h"

enum {
    KEY_BYTES = 16,
    NONCE_BYTES = 12,
    LENGTH_BYTES = 4,
    TAG_BYTES = 16,
    OVERHEAD_BYTES = LENGTH_BYTES + TAG_BYTES,
    SCOPE_ROOM = 128,
    FIRST_BYTES = HEADER_BYTES + SMALL_BYTES, /* the most plaintext in the first record of a transfer */
    LONG_BYTES = 1 << 14, /* records from this on are sealed as a whole if there is a cipher for it */
    REKEY_RECORDS = 1 << 24,
    GET_TAG = 0x10, /* of EVP_CIPHER_CTX_ctrl */
    SET_TAG = 0x11,
};
static const uint32_t NEXT_KEY = 1u << 31; /* in a record's length: it is the first under the next key */
static const int64_t REKEY_NS = 900ll * 1000 * 1000 * 1000;

struct libcrypto {
    void *(*ctx_new)(void);
    void (*ctx_free)(void *ctx);
    int (*ctx_ctrl)(void *ctx, int type, int arg, void *ptr);
    const void *(*aes_128_gcm)(void);
    int (*encrypt_init)(void *ctx, const void *cipher, void *engine, const uint8_t *key, const uint8_t *iv);
    int (*encrypt_update)(void *ctx, uint8_t *out, int *out_length, const uint8_t *in, int in_length);
    int (*encrypt_final)(void *ctx, uint8_t *out, int *out_length);
    int (*decrypt_init)(void *ctx, const void *cipher, void *engine, const uint8_t *key, const uint8_t *iv);
    int (*decrypt_update)(void *ctx, uint8_t *out, int *out_length, const uint8_t *in, int in_length);
    int (*decrypt_final)(void *ctx, uint8_t *out, int *out_length);
    const void *(*sha256)(void);
    uint8_t *(*hmac)(const void *digest, const void *key, int key_length, const uint8_t *data, size_t length,
                     uint8_t *out, unsigned *out_length);
    void (*clear_error)(void);
};
extern struct libcrypto crypto;

/* Overwrites keys with zeros, also if nothing reads the memory afterwards. */
void wipe(void *memory, size_t nbytes);

/* One direction of one stream: its key, the count of its records, and when the key has to change. */
struct keyed {
    void *ctx;
    PyObject *cipher; /* a Python object that seals or opens long records, or NULL */
    bool is_cipher_stale; /* it has not been given the key yet, which takes the interpreter's lock */
    uint8_t key[KEY_BYTES];
    uint8_t scope[SCOPE_ROOM];
    size_t scope_bytes;
    uint64_t count, rekey_at;
};

static inline bool is_long(const struct keyed *keyed, int64_t nbytes) { return keyed->cipher != NULL && nbytes >= LONG_BYTES; }

/* Takes the keys of one end of a stream: (fd, key out, scope out, cipher out, key in, scope in, cipher in). False with a
 * Python error set if they are not usable. */
bool keyed_take(PyObject *stream, int *fd, struct keyed *sealer, struct keyed *opener);
void keyed_release(struct keyed *keyed);
bool next_key(struct keyed *keyed, bool seals);
bool start_record(struct keyed *keyed, const uint8_t length[LENGTH_BYTES], bool seals);
bool work_whole(struct keyed *keyed, bool seals, const uint8_t *length, const uint8_t *from, int64_t from_bytes,
                uint8_t *into, int64_t into_bytes);

/* The whole of a record at once. `head` is where it begins: the length, which these fill in or read, then the rest. With
 * `is_plain`, libcrypto does it, whatever ciphers there are, and the interpreter's lock is not taken. `is_due` renews the key
 * first. */
bool seal_record(struct keyed *keyed, const uint8_t *plain, int64_t nbytes, uint8_t *head, bool is_due, bool is_plain);
int64_t record_length(const uint8_t head[LENGTH_BYTES]);
bool open_record(struct keyed *keyed, const uint8_t *head, int64_t nbytes, uint8_t *into, bool is_plain);

#endif
