-- How the claim script ends jobs that nobody will run, and what it notes for its caller: worker/scripts.py puts this
-- text between common.lua and delayed.lua.
-- An item: id, stream, entry, here (stream|entry), fields, pending, submitted (ms), record (see claim.lua)

local MAX_BODY_BYTES = 4 * 1024 * 1024
local MAX_LABEL_BYTES = 1024 -- 256 characters, and as much as a dead letter keeps
local worker, now = ARGV[1], now_ms()
local notes = {}

local function note(kind, id, text, record)
  record = record or {}
  notes[#notes + 1] = {kind, id or '', text or '', record.epoch or 0, record.claims or 0}
end

-- Writes a dead letter; that this fails (`dead` is of another type) must not keep the entry in the way.
local function send_letter(item, reason, message)
  local problem = guarded(bury, {reason = reason, error = message, attempts = item.record.attempts,
    worker = item.record.worker, stream = item.stream, fields = item.fields})
  local id = item.id and item.id:sub(1, 128)
  local kind, text = 'dead_letter', reason .. ': ' .. message
  if problem then kind, text = 'unburied', problem end
  note(kind, id, text, item.record)
end

-- Ends a job that nobody will run, and says so. `letter`: the reason of a dead letter to write first, or nil.
local function close(item, kind, event, letter)
  if letter then send_letter(item, letter, event.message) end
  local problem = end_job(item.id, cjson.encode(event), item.stream, item.entry, item.record.worker or worker)
  note(kind, item.id, problem or event.message, item.record)
end

local function refuse(item, code, message, letter)
  close(item, code, {type = 'error', code = code, message = message, retryable = false}, letter)
end

-- A key of the job is not what it should be, so nothing is known of it. Under another id it would have run.
local function give_up(item, problem)
  close(item, 'internal', {type = 'error', code = 'internal', message = problem, retryable = true}, 'broken_key')
end

-- Ends a job as `done`; what was published of it before stays and is counted.
local function finish(item, reason)
  local first = redis.call('XRANGE', base .. 'out:' .. item.id, '-', '+', 'COUNT', 1)[1]
  local known, event = pcall(function() return cjson.decode(first[2][2]) end)
  local start = known and type(event) == 'table' and event or {}
  close(item, reason, {type = 'done', finish_reason = reason, stop = cjson.null, text = '',
    usage = {prompt_tokens = tonumber(start.prompt_tokens) or 0, cached_tokens = tonumber(item.record.cached or 0),
             completion_tokens = item.record.n, preemptions = 0},
    timings = {queue = math.max(0, now - item.submitted) / 1000, total = 0}})
end

-- Unix milliseconds in plain digits; Lua's own tonumber would take 'nan', '0x10' and '1e300', too.
local function plain_time(text) return not text or (text:match('^%d+$') ~= nil and #text <= 15) end

-- What is wrong with an entry as such: code and message, and the reason of a dead letter where people should know.
local function fault(fields)
  if fields.v and fields.v ~= '1' then
    return 'unsupported', 'v: protocol version 1 expected, got ' .. shown(fields.v)
  elseif not fields.body then
    return 'invalid', 'body: a JSON or MessagePack object expected, got none'
  elseif #fields.body > MAX_BODY_BYTES then
    return 'too_large', 'body: at most ' .. MAX_BODY_BYTES .. ' bytes expected, got ' .. #fields.body, 'too_large'
  end
  for _, name in ipairs({'tenant', 'affinity', 'traceparent'}) do
    if fields[name] and #fields[name] > MAX_LABEL_BYTES then
      return 'invalid', name .. ': at most ' .. MAX_LABEL_BYTES .. ' bytes expected, got ' .. #fields[name], 'malformed'
    end
  end
  for _, name in ipairs({'deadline', 'not_before'}) do
    if not plain_time(fields[name]) then
      return 'invalid', name .. ': unix milliseconds expected, got ' .. shown(fields[name]), 'malformed'
    end
  end
end

-- What is wrong with an entry as such; true when it has been dealt with.
local function refused(item)
  local code, message, letter = fault(item.fields)
  if code then refuse(item, code, message, letter) end
  return code ~= nil
end
