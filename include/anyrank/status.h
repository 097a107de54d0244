/* SPDX-License-Identifier: Apache-2.0 */
#ifndef ANYRANK_STATUS_H
#define ANYRANK_STATUS_H

/* Every header wraps its declarations in this pair of macros, which gives them C linkage in C++. */
#ifdef __cplusplus
#define AR_BEGIN_DECLS extern "C" {
#define AR_END_DECLS }
#else
#define AR_BEGIN_DECLS
#define AR_END_DECLS
#endif

/* AR_NODISCARD: the compiler warns if a caller ignores the returned status. AR_PRINTF: the compiler checks arguments
 * against a printf format, which is parameter number format_at; the arguments begin at number first_at. */
#if defined(__GNUC__)
#define AR_NODISCARD __attribute__((warn_unused_result))
#define AR_PRINTF(format_at, first_at) __attribute__((format(printf, format_at, first_at)))
#else
#define AR_NODISCARD
#define AR_PRINTF(format_at, first_at)
#endif

AR_BEGIN_DECLS

/* The status codes, X(code, name, description): AR_OK is 0, errors are negative. */
#define AR_STATUS_TABLE(X)                                    \
    X(0, OK, "no error")                                      \
    X(-1, ERR_ARG, "invalid argument")                        \
    X(-2, ERR_SHAPE, "shapes do not fit")                     \
    X(-3, ERR_DTYPE, "wrong data type")                       \
    X(-4, ERR_INDIVISIBLE, "a dimension does not divide")     \
    X(-5, ERR_OVERFLOW, "a size overflows")                   \
    X(-6, ERR_MEMORY, "out of memory")                        \
    X(-7, ERR_IO, "input or output failed")                   \
    X(-8, ERR_FORMAT, "malformed file")                       \
    X(-9, ERR_CONFIG, "unusable model configuration")         \
    X(-10, ERR_DATA, "unusable values in the data")           \
    X(-11, ERR_UNSUPPORTED, "not supported")                  \
    X(-12, ERR_MISMATCH, "ranks disagree about a collective") \
    X(-13, ERR_ABORTED, "another rank failed")                \
    X(-14, ERR_TIMEOUT, "waited too long for a rank")         \
    X(-15, ERR_NOT_FOUND, "no such name")                     \
    X(-16, ERR_INTERNAL, "broken internal invariant")         \
    X(-17, ERR_DEVICE, "the device failed")

/* Result of a function: AR_OK or AR_ERR_.. */
typedef enum ar_status {
#define AR_STATUS_ENUM(code, name, text) AR_##name = (code),
    AR_STATUS_TABLE(AR_STATUS_ENUM)
#undef AR_STATUS_ENUM
} ar_status;

/** Returns the name of a status, such as "AR_ERR_SHAPE"; "AR_?" for an unknown code. Static storage. */
const char *ar_status_name(ar_status st);

/** Returns the message of the calling thread's last failure: what failed, where, the expected and the actual value; ""
 *  if there was none. Thread-local storage, valid until the next call that fails on this thread. */
const char *ar_error_message(void);
/** Resets the calling thread's error message to "". */
void ar_error_clear(void);
/** Sets the calling thread's error message (replacing the previous one) from a printf format and returns `st`.
 *  User-written modules use it to return an error with a message:
 *  `return ar_error_set(AR_ERR_SHAPE, "my_layer: x has %zu columns, expected %zu", got, want);` */
ar_status ar_error_set(ar_status st, const char *format, ...) AR_PRINTF(2, 3);

/* Error propagation. AR_TRY evaluates a call and returns its status if it is not AR_OK; AR_TRY_TO stores the status in
 * `st` and jumps to `label` if it is not AR_OK. */
#define AR_TRY(call)                             \
    do {                                         \
        const ar_status ar_try_status_ = (call); \
        if (ar_try_status_ != AR_OK)             \
            return ar_try_status_;               \
    } while (0)
#define AR_TRY_TO(label, st, call) \
    do {                           \
        (st) = (call);             \
        if ((st) != AR_OK)         \
            goto label;            \
    } while (0)

AR_END_DECLS
#endif
