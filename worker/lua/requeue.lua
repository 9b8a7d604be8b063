-- Gives a dead letter another life: its job, reply and cancel wish go, and it is added to its stream again.
-- KEYS[1]  the queue's prefix
-- ARGV[1]  entry id of the dead letter
-- Returns  the id of the new entry; or an error reply:
--   GONE     there is no such dead letter
--   NOBODY   it cannot be added again: it has no usable id, or its body was too large to keep

local letter = redis.call('XRANGE', base .. 'dead', ARGV[1], ARGV[1])[1]
if not letter then return redis.error_reply('GONE no dead letter ' .. shown(ARGV[1])) end
local fields = map_of(letter[2])
if not fields.id:match('^[%w._:-]+$') or not fields.body or fields.body == '' then
  return redis.error_reply('NOBODY the dead letter ' .. shown(ARGV[1]) .. ' holds no job that could be added again')
end
local args = {'id', fields.id, 'body', fields.body}
for _, name in ipairs({'traceparent', 'tenant', 'affinity'}) do
  if fields[name] then
    args[#args + 1] = name
    args[#args + 1] = fields[name]
  end
end
redis.call('DEL', base .. 'job:' .. fields.id, base .. 'out:' .. fields.id, base .. 'cancel:' .. fields.id)
local entry = redis.call('XADD', base .. fields.stream, '*', unpack(args))
redis.call('XDEL', base .. 'dead', ARGV[1])
ring()
return entry
