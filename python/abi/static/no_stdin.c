/* SPDX-License-Identifier: Apache-2.0 */
/* Debian's static jansson library is compiled for programs: json_loadf compares its file with stdin through an address
 * that a shared library cannot have for the C library's variables. With this definition it finds a variable that equals
 * no file. Nothing in the shared library reads standard input. */
extern void *const ari_no_stdin __asm__("stdin") __attribute__((visibility("hidden")));
void *const ari_no_stdin = 0;
