/* The keys and ciphers of streams: see keyed.h. */
#include "keyed.h"

#include "attributes.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const char NEXT_LABEL[] = "covey/1/lane/next";

/* libcrypto */

struct libcrypto crypto;

void wipe(void *memory, size_t nbytes)
{
    memset(memory, 0, nbytes);
    __asm__ __volatile__("" : : "r"(memory) : "memory"); /* or a compiler leaves out what is written before a free */
}

static bool is_loaded;

bool crypto_is_loaded(void) { return is_loaded; }

/* `library` is the file of Python's _ssl module: the search in it covers the libraries that it was linked with. It is ""
 * where that module is part of the interpreter. */
bool crypto_load(const char *library, char *trouble, size_t room)
{
    static const char *const names[] = {
        "EVP_CIPHER_CTX_new", "EVP_CIPHER_CTX_free", "EVP_CIPHER_CTX_ctrl", "EVP_aes_128_gcm",     "EVP_EncryptInit_ex",
        "EVP_EncryptUpdate",  "EVP_EncryptFinal_ex", "EVP_DecryptInit_ex",  "EVP_DecryptUpdate",   "EVP_DecryptFinal_ex",
        "EVP_sha256",         "HMAC",                "ERR_clear_error",
    };
    void **slots = (void **)&crypto;
    void *handle = dlopen(*library ? library : NULL, RTLD_NOW | RTLD_LOCAL);
    if (handle == NULL) {
        snprintf(trouble, room, "%s", dlerror());
        return false;
    }
    for (size_t index = 0; index < sizeof names / sizeof *names; index++) {
        slots[index] = dlsym(handle, names[index]);
        if (slots[index] == NULL) {
            snprintf(trouble, room, "%s has no %s", library, names[index]);
            return false;
        }
    }
    is_loaded = true;
    return true;
}

/* Encrypts `nbytes` zeros twice, and returns the nanoseconds that the second time took; -1 if that failed. */
int64_t crypto_time(int64_t nbytes)
{
    uint8_t key[KEY_BYTES] = {0}, nonce[NONCE_BYTES] = {0};
    uint8_t *plain = calloc(1, (size_t)nbytes), *out = malloc((size_t)nbytes);
    void *ctx = crypto.ctx_new();
    int64_t took = -1;
    int written;
    bool is_ready = plain != NULL && out != NULL && ctx != NULL;
    for (int round = 0; is_ready && round < 2; round++) {
        int64_t begin = monotonic_ns();
        is_ready = crypto.encrypt_init(ctx, crypto.aes_128_gcm(), NULL, key, nonce) == 1 &&
                   crypto.encrypt_update(ctx, out, &written, plain, (int)nbytes) == 1;
        took = is_ready ? monotonic_ns() - begin : -1;
    }
    if (ctx != NULL)
        crypto.ctx_free(ctx);
    free(plain);
    free(out);
    return took;
}

static bool set_key(struct keyed *keyed, bool seals)
{
    int (*init)(void *, const void *, void *, const uint8_t *, const uint8_t *) =
        seals ? crypto.encrypt_init : crypto.decrypt_init;
    return init(keyed->ctx, crypto.aes_128_gcm(), NULL, keyed->key, NULL) == 1;
}

/* Long records. These take the interpreter's lock, and release it while the cipher works. */

/* Whether a call returned True. What a signal handler raised in it stays set for the operation, which raises it; on the
 * helper's thread, whose state in the interpreter ends with the call, there are no signal handlers. */
static bool succeeded(PyObject *result, bool is_helper)
{
    bool is_true = result == Py_True;
    if (result == NULL && is_helper)
        PyErr_Clear();
    Py_XDECREF(result);
    return is_true;
}

/* Gives the cipher the key, if that has changed. With the interpreter's lock. */
static bool set_cipher_key(struct keyed *keyed, bool is_helper)
{
    if (!keyed->is_cipher_stale)
        return true;
    PyObject *key = PyMemoryView_FromMemory((char *)keyed->key, KEY_BYTES, PyBUF_READ); /* no copy that would be left */
    bool is_set =
        key != NULL &&
        succeeded(PyObject_CallMethodObjArgs(keyed->cipher, attribute_names[CIPHER_SET_KEY], key, NULL), is_helper);
    Py_XDECREF(key);
    keyed->is_cipher_stale = !is_set;
    return is_set;
}

/* Calls cipher.seal or cipher.open(count, length, from, into), and counts the record. */
bool work_whole(struct keyed *keyed, bool seals, const uint8_t *length, const uint8_t *from,
                int64_t from_bytes, uint8_t *into, int64_t into_bytes)
{
    uint64_t count = keyed->count++; /* counted first: if the next call fails, this nonce is not used again */
    bool is_helper = PyGILState_GetThisThreadState() == NULL;
    PyGILState_STATE state = PyGILState_Ensure();
    PyObject *source = PyMemoryView_FromMemory((char *)from, (Py_ssize_t)from_bytes, PyBUF_READ);
    PyObject *target = PyMemoryView_FromMemory((char *)into, (Py_ssize_t)into_bytes, PyBUF_WRITE);
    PyObject *number = PyLong_FromUnsignedLongLong(count), *head = PyBytes_FromStringAndSize((const char *)length, LENGTH_BYTES);
    PyObject *result = NULL;
    if (source != NULL && target != NULL && number != NULL && head != NULL && set_cipher_key(keyed, is_helper))
        result = PyObject_CallMethodObjArgs(keyed->cipher, attribute_names[seals ? CIPHER_SEAL : CIPHER_OPEN], number, head,
                                            source, target, NULL);
    bool is_done = succeeded(result, is_helper);
    Py_XDECREF(number);
    Py_XDECREF(head);
    Py_XDECREF(source);
    Py_XDECREF(target);
    PyGILState_Release(state);
    return is_done;
}

/* Replaces the key by one from which the last one cannot be computed: HKDF-Expand with SHA-256. */
bool next_key(struct keyed *keyed, bool seals)
{
    uint8_t info[sizeof NEXT_LABEL], digest[64];
    unsigned length = 0;
    memcpy(info, NEXT_LABEL, sizeof NEXT_LABEL - 1);
    info[sizeof NEXT_LABEL - 1] = 1;
    if (crypto.hmac(crypto.sha256(), keyed->key, KEY_BYTES, info, sizeof info, digest, &length) == NULL)
        return false;
    memcpy(keyed->key, digest, KEY_BYTES);
    wipe(digest, sizeof digest);
    keyed->rekey_at = keyed->count + REKEY_RECORDS;
    keyed->is_cipher_stale = keyed->cipher != NULL;
    return set_key(keyed, seals);
}

/* Starts the next record: nonce and what the tag covers beside the text. */
bool start_record(struct keyed *keyed, const uint8_t length[LENGTH_BYTES], bool seals)
{
    uint8_t covered[SCOPE_ROOM + NONCE_BYTES + LENGTH_BYTES], nonce[NONCE_BYTES] = {0};
    int written;
    for (int index = 0; index < 8; index++)
        nonce[NONCE_BYTES - 1 - index] = (uint8_t)(keyed->count >> (8 * index));
    keyed->count++; /* counted first: if the next call fails, this nonce is not used again */
    memcpy(covered, keyed->scope, keyed->scope_bytes);
    memcpy(covered + keyed->scope_bytes, nonce, NONCE_BYTES);
    memcpy(covered + keyed->scope_bytes + NONCE_BYTES, length, LENGTH_BYTES);
    int covered_bytes = (int)(keyed->scope_bytes + NONCE_BYTES + LENGTH_BYTES);
    if (seals)
        return crypto.encrypt_init(keyed->ctx, NULL, NULL, NULL, nonce) == 1 &&
               crypto.encrypt_update(keyed->ctx, NULL, &written, covered, covered_bytes) == 1;
    return crypto.decrypt_init(keyed->ctx, NULL, NULL, NULL, nonce) == 1 &&
           crypto.decrypt_update(keyed->ctx, NULL, &written, covered, covered_bytes) == 1;
}

static bool key_init(struct keyed *keyed, const uint8_t *key, const uint8_t *scope, Py_ssize_t scope_bytes, bool seals)
{
    memcpy(keyed->key, key, KEY_BYTES);
    memcpy(keyed->scope, scope, (size_t)scope_bytes);
    keyed->scope_bytes = (size_t)scope_bytes;
    keyed->rekey_at = REKEY_RECORDS;
    keyed->ctx = crypto.ctx_new();
    keyed->is_cipher_stale = keyed->cipher != NULL;
    return keyed->ctx != NULL && set_key(keyed, seals);
}

bool keyed_take(PyObject *stream, int *fd, struct keyed *sealer, struct keyed *opener)
{
    const char *key_out, *scope_out, *key_in, *scope_in;
    PyObject *cipher_out, *cipher_in;
    Py_ssize_t key_out_bytes, scope_out_bytes, key_in_bytes, scope_in_bytes;
    if (!PyArg_ParseTuple(stream, "iy#y#Oy#y#O", fd, &key_out, &key_out_bytes, &scope_out, &scope_out_bytes, &cipher_out,
                          &key_in, &key_in_bytes, &scope_in, &scope_in_bytes, &cipher_in))
        return false;
    if (key_out_bytes != KEY_BYTES || key_in_bytes != KEY_BYTES || scope_out_bytes > SCOPE_ROOM || scope_in_bytes > SCOPE_ROOM) {
        PyErr_SetString(PyExc_ValueError, "a key has 16 bytes, and a scope at most 128");
        return false;
    }
    if (cipher_out != Py_None && cipher_in != Py_None) {
        if (!has_attributes(cipher_out, CIPHER) || !has_attributes(cipher_in, CIPHER))
            return false;
        Py_INCREF(cipher_out);
        Py_INCREF(cipher_in);
        sealer->cipher = cipher_out;
        opener->cipher = cipher_in;
    }
    if (key_init(sealer, (const uint8_t *)key_out, (const uint8_t *)scope_out, scope_out_bytes, true) &&
        key_init(opener, (const uint8_t *)key_in, (const uint8_t *)scope_in, scope_in_bytes, false))
        return true;
    if (!PyErr_Occurred())
        PyErr_SetString(PyExc_RuntimeError, "libcrypto has no AES-128-GCM");
    return false;
}

void keyed_release(struct keyed *keyed)
{
    if (keyed->ctx != NULL)
        crypto.ctx_free(keyed->ctx);
    Py_XDECREF(keyed->cipher);
    wipe(keyed, sizeof *keyed);
}

bool seal_record(struct keyed *keyed, const uint8_t *plain, int64_t nbytes, uint8_t *head, bool is_due, bool is_plain)
{
    uint32_t length = (uint32_t)nbytes;
    int written;
    if (is_due || keyed->count == keyed->rekey_at) {
        length |= NEXT_KEY;
        if (!next_key(keyed, true))
            return false;
    }
    for (int index = 0; index < LENGTH_BYTES; index++)
        head[index] = (uint8_t)(length >> (8 * index));
    uint8_t *text = head + LENGTH_BYTES, *tag = text + nbytes;
    if (!is_plain && is_long(keyed, nbytes))
        return work_whole(keyed, true, head, plain, nbytes, text, nbytes + TAG_BYTES);
    return start_record(keyed, head, true) &&
           crypto.encrypt_update(keyed->ctx, text, &written, plain, (int)nbytes) == 1 &&
           crypto.encrypt_final(keyed->ctx, tag, &written) == 1 &&
           crypto.ctx_ctrl(keyed->ctx, GET_TAG, TAG_BYTES, tag) == 1;
}

int64_t record_length(const uint8_t head[LENGTH_BYTES])
{
    uint32_t length = head[0] | (uint32_t)head[1] << 8 | (uint32_t)head[2] << 16 | (uint32_t)head[3] << 24;
    return (int64_t)(length & ~NEXT_KEY);
}

bool open_record(struct keyed *keyed, const uint8_t *head, int64_t nbytes, uint8_t *into, bool is_plain)
{
    uint8_t nothing[TAG_BYTES];
    int written;
    bool is_next_key = head[LENGTH_BYTES - 1] & NEXT_KEY >> 24;
    if (is_next_key ? !next_key(keyed, false) : keyed->count == keyed->rekey_at)
        return false;
    const uint8_t *text = head + LENGTH_BYTES;
    if (!is_plain && is_long(keyed, nbytes))
        return work_whole(keyed, false, head, text, nbytes + TAG_BYTES, into, nbytes);
    if (start_record(keyed, head, false) && crypto.decrypt_update(keyed->ctx, into, &written, text, (int)nbytes) == 1 &&
        crypto.ctx_ctrl(keyed->ctx, SET_TAG, TAG_BYTES, (void *)(text + nbytes)) == 1 &&
        crypto.decrypt_final(keyed->ctx, nothing, &written) == 1)
        return true;
    crypto.clear_error();
    return false;
}
