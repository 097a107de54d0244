# cmake -DIN=FILE -DPARTS="FILE;..." -DOUT=FILE.c -DNAME=name -P Embed.cmake: a C file with the bytes of IN as `name`, a 0
# after them, and their number as `name_bytes`. Lines "@part.css@" of IN are replaced by the part of that name.
file(READ ${IN} text)
foreach(part IN LISTS PARTS)
  get_filename_component(place ${part} NAME)
  file(READ ${part} inside)
  string(REPLACE "@${place}@\n" "${inside}" text "${text}")
endforeach()
string(HEX "${text}" hex)
string(LENGTH "${hex}" digits)
math(EXPR bytes "${digits} / 2")
string(REGEX REPLACE "([0-9a-f][0-9a-f])" "0x\\1," hex "${hex}")
string(REGEX REPLACE "(0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,0x..,)" "\\1\n" hex "${hex}")
file(WRITE ${OUT} "extern const unsigned char ${NAME}[];\nextern const unsigned long ${NAME}_bytes;\n"
                  "const unsigned char ${NAME}[] = {\n${hex}0};\nconst unsigned long ${NAME}_bytes = ${bytes};\n")
