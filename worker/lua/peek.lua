-- Reads entries of a queue's streams without their bodies, which may be large. Writes nothing; works on a replica, too.
-- KEYS[1]  the queue's prefix
-- ARGV[1]  the most entries of all; then 3 per range: stream (short name), start, end, as XRANGE takes them; a range
--          that starts at + or ends at - is read backwards
-- Returns  {more, rows}
--   more   1: stopped early, because the bodies that were skipped became too many
--   rows   per entry: number of its range (from 1), entry id, bytes of the body (-1: there is none), then name and
--          value of its other fields, at most 24 of them and each cut after 1,024 bytes
-- Error words: none of its own. A stream that is missing or of another type has no entries, nor has a range of no ids.

local MAX_BYTES = 16 * 1024 * 1024 -- the server copies what it reads, and nobody else is served meanwhile
local MAX_FIELDS, MAX_VALUE = 24, 1024

local want, rows, bytes, more = tonumber(ARGV[1]), {}, 0, 0

local function seen(range, entry, flat)
  local row = {range, entry, -1}
  for i = 1, #flat, 2 do
    bytes = bytes + #flat[i] + #flat[i + 1]
    if flat[i] == 'body' then
      row[3] = #flat[i + 1]
    elseif #row < 3 + 2 * MAX_FIELDS then
      row[#row + 1] = flat[i]:sub(1, MAX_VALUE)
      row[#row + 1] = flat[i + 1]:sub(1, MAX_VALUE)
    end
  end
  rows[#rows + 1] = row
end

local function walk(range, stream, start, last)
  local command = (start == '+' or last == '-') and 'XREVRANGE' or 'XRANGE'
  while #rows < want do
    if bytes > MAX_BYTES then
      more = 1
      return
    end
    -- one by one: a batch would be copied whole, however large its bodies are
    local entry = redis.call(command, base .. stream, start, last, 'COUNT', 1)[1]
    if not entry then return end
    seen(range, entry[1], entry[2])
    if entry[1] == last then return end
    start = '(' .. entry[1]
  end
end

for i = 2, #ARGV, 3 do
  local problem = guarded(walk, (i + 1) / 3, ARGV[i], ARGV[i + 1], ARGV[i + 2])
  if problem and problem:find('^ERR ') and not problem:find('Invalid stream ID', 1, true) then
    error({err = problem}, 0) -- this user may not look: that there is nothing would be a lie
  end
end
return {more, rows}
