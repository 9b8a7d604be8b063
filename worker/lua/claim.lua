-- Hands out jobs: promotes delayed ones, takes over what was released or lost its worker, then reads new entries.
-- KEYS[1]  the queue's prefix; KEYS[2…] the job streams in scan order
-- ARGV[1]  worker   ARGV[2] want: the most jobs to hand out   ARGV[3] lease in ms
-- ARGV[4]  '1' to scan for expired entries too   ARGV[5] '1' to take up own pending entries that are not active
-- ARGV[6]  limit of charged attempts   ARGV[7] limit of claims   ARGV[8] the worker's free slots, of which new
-- entries leave one for each job that had begun and must wait ('': none);   ARGV[9…] ids of the jobs active in this worker
-- Returns  {now in ms, more, suspects, groups, last id of the bell ('': it is no stream), streams, jobs, notes, left, kept}
--   more      1: stopped before everything was dealt with     suspects  number of jobs that had begun and must
--             wait: suspects, and in the quiet time all that may have lost their worker
--   groups    number of groups that were lost and made again
--   streams   per stream: name, last id delivered (read on from it), waiting entries, how many of them were never handed
--             out
--   jobs      per job: id, stream, entry, epoch, attempts, claims, n, cached_tokens, suspect, submitted ms, taken from
--             ('' a new entry, else its last worker), body, deadline, tenant, affinity, traceparent ('' where absent)
--   notes     per event: kind, id, text, epoch and claims (0 where there is no record). Ended here: cancelled deadline
--             invalid unsupported too_large max_attempts internal. Dropped: duplicate ended vanished. Others: delayed
--             promoted dead_letter unburied (the dead letter could not be written) unowned (entries that nobody had)
--             stream (a key of the queue is not what it should be)
--   left      1: expired entries were left for want of room    kept  1: new ones were left for the sake of suspects
-- Error words: none of its own. A lost group is made again at id 0; a stream of another type becomes a note.

local MAX_REPLY_BYTES = 16 * 1024 * 1024
local JOB_BYTES = 4096 -- of one in the reply, beside its body
local MAX_HANDLED = 256 -- entries dealt with in one call, so that a million duplicates cannot block the server
local PAGE, MAX_PAGES, FEW = 100, 10, 10 -- FEW: entries read whole at a time, for their bodies may be large

local want, lease = tonumber(ARGV[2]), tonumber(ARGV[3])
local scan_expired, scan_own = ARGV[4] == '1', ARGV[5] == '1'
local max_attempts, max_claims, slots = tonumber(ARGV[6]), tonumber(ARGV[7]), tonumber(ARGV[8])
local active = {}
for i = 9, #ARGV do active[ARGV[i]] = true end

local jobs, leases = {}, {}
local bytes, handled, suspects, groups, more, left, kept = 0, 0, 0, 0, false, false, false

local function full()
  return #jobs >= want or handled >= MAX_HANDLED or bytes + MAX_BODY_BYTES + JOB_BYTES > MAX_REPLY_BYTES
end

local function usable(id) return id and #id <= 128 and id:match('^[%w._:-]+$') ~= nil end

-- The lease that a worker told of with its heartbeat: it renews by that one, which need not be ours.
local function lease_of(name)
  if not leases[name] then
    local ok, told = pcall(redis.call, 'HGET', base .. 'worker:' .. name, 'lease')
    leases[name] = ok and tonumber(told or '') or lease
  end
  return leases[name]
end

local function alive(name)
  local heartbeat = redis.call('ZSCORE', base .. 'workers', name)
  return heartbeat and tonumber(heartbeat) >= now - lease_of(name)
end

local function load_record(id)
  local got = redis.call('HMGET', base .. 'job:' .. id, 'state', 'entry', 'epoch', 'worker', 'attempts', 'claims', 'n',
    'cached_tokens', 'charged')
  return {state = got[1], entry = got[2], epoch = tonumber(got[3] or '0'), worker = got[4] or '',
          attempts = tonumber(got[5] or '0'), claims = tonumber(got[6] or '0'), n = tonumber(got[7] or '0'),
          cached = got[8] and got[8]:match('^%d+$'), charged = got[9] or ''}
end

-- The reply is the truth about n and about the end; the record may be lost or older (a failover). Where the reply is
-- gone, n stays: the tokens are generated again from 0 and published from n. Returns whether the job has ended: a record
-- that says so beside a reply without an end is wrong, somebody still waits for one.
local function reconcile(id, record)
  local n, sequence, last = last_of(id)
  if not n then return record.state == 'ended' end
  if last == TERMINAL then return true end
  record.n = n
  record.epoch = math.max(record.epoch, sequence) -- so that our mark sorts behind those of lost epochs
  return false
end

-- Charged is who was running when the worker died; not one whose worker lives (its claim's answer was lost), and none
-- whose dead worker had another job on trial, for that one is to blame.
local function charge(item)
  local record = item.record
  if record.state ~= 'running' or record.worker == worker or alive(record.worker) then return end
  local trial = redis.call('HGET', base .. 'worker:' .. record.worker, 'trial')
  if not trial or trial == item.id then record.attempts, record.charged = record.attempts + 1, record.worker end
end

-- Whether another suspect than `candidate` is on trial in this worker.
local function on_trial(candidate)
  local id = redis.call('HGET', base .. 'worker:' .. worker, 'trial')
  if not id or id == candidate then return false end
  local got = redis.call('HMGET', base .. 'job:' .. id, 'state', 'worker')
  return active[id] or (got[1] == 'running' and got[2] == worker)
end

local function take(item)
  local record, fields = item.record, item.fields
  local key, suspect = base .. 'job:' .. item.id, record.attempts > 0
  local epoch, claims = record.epoch + 1, record.claims + 1
  if item.pending then redis.call('XCLAIM', base .. item.stream, GROUP, worker, 0, item.entry, 'JUSTID') end
  redis.call('HSET', key, 'state', 'running', 'epoch', epoch, 'worker', worker, 'attempts', record.attempts,
    'claims', claims, 'n', record.n, 'entry', item.here, 'charged', record.charged)
  redis.call('PEXPIRE', key, DAY_MS)
  if suspect then
    redis.call('HSET', base .. 'worker:' .. worker, 'trial', item.id)
    redis.call('PEXPIRE', base .. 'worker:' .. worker, 10 * lease)
  end
  bytes = bytes + #fields.body + JOB_BYTES
  jobs[#jobs + 1] = {item.id, item.stream, item.entry, epoch, record.attempts, claims, record.n, record.cached or '',
    suspect and 1 or 0, item.submitted, record.state == 'running' and record.worker or '', fields.body,
    fields.deadline or '', fields.tenant or '', fields.affinity or '', fields.traceparent or ''}
end

-- Whether the job ends or waits here instead of running now; true when it has been dealt with.
local function settled(item)
  local fields, record = item.fields, item.record
  local deadline, not_before = tonumber(fields.deadline or ''), tonumber(fields.not_before or '')
  if redis.call('EXISTS', base .. 'cancel:' .. item.id) == 1 then
    finish(item, 'cancelled')
  elseif deadline and deadline <= now then
    finish(item, 'deadline')
  elseif not_before and not_before > now and record.claims == 0 then
    park(item, not_before)
  elseif record.attempts >= max_attempts or record.claims >= max_claims then
    refuse(item, 'max_attempts', 'given up after ' .. record.attempts .. ' workers died with it and '
      .. record.claims .. ' claims', 'max_attempts')
  else
    return false
  end
  return true
end

-- Whether another entry stands for this id: it is in its stream, or parked. One that was deleted, or got lost in a
-- failover, stands for nothing: this one takes its place, or submitting the job again would be in vain.
local function duplicate(item)
  local record = item.record
  if not record.entry or record.entry == item.here then return false end
  if record.state == 'delayed' then return redis.call('ZSCORE', base .. 'delayed', item.id) ~= false end
  local stream, entry = record.entry:match('^([^|]+)|(.+)$')
  return #redis.call('XRANGE', base .. stream, entry, entry) > 0
end

local function admit(item)
  item.record = load_record(item.id)
  local record = item.record
  local ended = reconcile(item.id, record)
  if duplicate(item) then
    drop(item.stream, item.entry)
    return note('duplicate', item.id, nil, record)
  end
  if ended then
    if record.state == 'ended' then
      drop(item.stream, item.entry)
    else
      end_job(item.id, nil, item.stream, item.entry, record.worker or worker)
    end
    return note('ended', item.id, nil, record)
  end
  -- it runs here, or its live worker will renew it: it stays pending, and is looked at again when that ends
  if active[item.id] then return end
  if not item.expired and record.state == 'running' and record.worker ~= worker and alive(record.worker) then return end
  if refused(item) then return end
  charge(item)
  if settled(item) then return end
  if record.attempts > 0 and on_trial(item.id) then
    suspects = suspects + 1
    return
  end
  take(item)
end

-- One entry, whatever it is. What raises becomes a dead letter and an error for the client. `pending`: it was delivered
-- before; `expired`: and nobody has renewed it for a lease.
local function handle(stream, entry, flat, pending, expired)
  local item = {stream = stream, entry = entry, here = stream .. '|' .. entry, fields = map_of(flat), pending = pending,
                expired = expired, submitted = tonumber(entry:match('^%d+')), record = {}}
  item.id = item.fields.id
  local problem
  if usable(item.id) then
    problem = guarded(admit, item)
    if not problem then return end
    guarded(give_up, item, problem)
  else
    send_letter(item, 'malformed', 'id: 1 to 128 characters of [A-Za-z0-9._:-] expected, got ' .. shown(item.id or ''))
  end
  drop(stream, entry)
end

-- One pending entry; `expired`: nobody has renewed it for a lease.
local function recover_one(stream, id, expired)
  local entry, before = redis.call('XRANGE', base .. stream, id, id)[1], #jobs + #notes
  if entry then
    handle(stream, entry[1], entry[2], true, expired)
  else -- trimmed or deleted while pending: nothing is left to run
    redis.call('XACK', base .. stream, GROUP, id)
    note('vanished', '', stream .. ' ' .. id)
  end
  -- what was left alone (active, or a suspect) hides nothing behind it, and gives no reason to look again at once
  if #jobs + #notes > before then handled = handled + 1 end
end

-- Pending entries of `consumer` (nil: of anybody, by whose own lease they have expired) idle for at least `idle` ms.
local function recover(stream, idle, consumer)
  local start, of = '-', {consumer}
  for _ = 1, MAX_PAGES do
    local found = redis.call('XPENDING', base .. stream, GROUP, 'IDLE', idle, start, '+', PAGE, unpack(of))
    for _, pending in ipairs(found) do
      if full() then
        more, left = true, left or consumer == nil
        return
      end
      if consumer or pending[3] >= lease_of(pending[2]) then recover_one(stream, pending[1], not consumer) end
    end
    if #found < PAGE then return end
    start = '(' .. found[#found][1]
  end
  more = more or handled > 0
end

-- What was delivered is pending for somebody; an entry that is not (acknowledged by hand, or its consumer deleted) would
-- never be looked at again. To be called when no new entry is left: then the two counts tell at once. It is idle since
-- now, so that a live worker that runs its job has a lease to renew it.
local function release_unowned(stream)
  local missing = redis.call('XLEN', base .. stream) - redis.call('XPENDING', base .. stream, GROUP)[1]
  local start, found, seen, size = '-', 0, 0, 0
  while found < missing and seen < PAGE * MAX_PAGES and size < MAX_REPLY_BYTES do
    local entries = redis.call('XRANGE', base .. stream, start, '+', 'COUNT', FEW)
    for _, entry in ipairs(entries) do
      if #redis.call('XPENDING', base .. stream, GROUP, entry[1], entry[1], 1) == 0 then
        redis.call('XCLAIM', base .. stream, GROUP, RELEASED, 0, entry[1], 'FORCE', 'JUSTID')
        found = found + 1
      end
      for _, text in ipairs(entry[2]) do size = size + #text end
    end
    if #entries < FEW then break end
    seen, start = seen + FEW, '(' .. entries[FEW][1]
  end
  if found > 0 then
    note('unowned', '', stream .. ': ' .. found)
    more = true
  end
end

local function read_new(stream)
  while not full() do
    if slots and suspects > 0 and #jobs + suspects >= slots then
      kept = true
      return
    end
    -- one by one: a batch would be delivered whole, however large its bodies are
    local reply = redis.call('XREADGROUP', 'GROUP', GROUP, worker, 'COUNT', 1, 'STREAMS', base .. stream, '>')
    local got = reply and reply[1] and reply[1][2][1]
    if not got then return scan_expired and release_unowned(stream) end
    handled = handled + 1 -- whatever it is, the group has moved on
    handle(stream, got[1], got[2], false, false)
  end
  more = true
end

local calm = quiet(now, lease)

local function scan(stream)
  recover(stream, 0, RELEASED)
  if scan_own then recover(stream, 0, worker) end
  if not scan_expired then return end
  if not calm then return recover(stream, lease) end
  suspects = suspects + #redis.call('XPENDING', base .. stream, GROUP, 'IDLE', lease, '-', '+', slots or 1)
end

local function safely(f, stream)
  local problem = guarded(f, stream)
  if problem and problem:find('NOGROUP', 1, true) then
    redis.call('XGROUP', 'CREATE', base .. stream, GROUP, '0', 'MKSTREAM')
    groups = groups + 1
    problem = guarded(f, stream)
  end
  if problem then note('stream', '', stream .. ': ' .. problem) end
end

local function state_of(stream)
  local group = group_of(stream)
  if not group then return {stream, '0-0', 0, 0} end
  return {stream, group['last-delivered-id'], waiting(stream)} -- two numbers
end

local streams, states = {}, {}
for i = 2, #KEYS do streams[i - 1] = KEYS[i]:sub(#base + 1) end
local problem = guarded(promote)
if problem then note('stream', '', 'delayed: ' .. problem) end
for _, stream in ipairs(streams) do safely(scan, stream) end
for _, stream in ipairs(streams) do safely(read_new, stream) end
for _, stream in ipairs(streams) do guarded(function() states[#states + 1] = state_of(stream) end) end
local bell = '0-0'
problem = guarded(function()
  local last = redis.call('XREVRANGE', base .. 'bell', '+', '-', 'COUNT', 1)[1]
  if last then bell = last[1] end
end)
if problem then
  bell = '' -- to read on from nowhere: a blocked read of it would fail
  note('stream', '', 'bell: ' .. problem)
end
return {now, more and 1 or 0, suspects, groups, bell, states, jobs, notes, left and 1 or 0, kept and 1 or 0}
